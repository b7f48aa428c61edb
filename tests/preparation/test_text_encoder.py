"""A transformer encoder for text: torch's nn.TransformerEncoder, prepared, calibrated and trained."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from prepared_case import Plain, activation_quantizers, assert_computes_as, assert_takes_float_state, draw
from torch import Tensor, nn

import qat
from benchmarks.work import integer_work
from qat.layers import QuantEmbedding, QuantLayer
from qat.preparation.report import LEFT_IN_FLOAT, noted
from qat.quantizer import Quantizer

WORDS, LENGTH, WIDTH = 12, 6, 16


class TextClassifier(nn.Module):
    """Embedding, position, encoder, mean over the words, linear; word 0 is padding if the mask is passed."""

    def __init__(self, norm_first: bool, padded: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        nn.init.normal_(self.position, std=0.5)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)
        self.padded = padded

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position
        mask = words == 0 if self.padded else None
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


def sentences(count: int = 4, seed: int = 0) -> Tensor:
    """Words from 1 on; the last third of every other sentence is padding."""
    words = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    words[::2, -2:] = 0
    return words


def classifier(norm_first: bool, padded: bool, dropout: float = 0.0) -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier(norm_first, padded, dropout)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_the_prepared_encoder_computes_as_torchs(norm_first: bool, padded: bool) -> None:
    net = classifier(norm_first, padded).eval()
    model = qat.prepare(net, example_inputs=sentences())
    assert noted(model, LEFT_IN_FLOAT).keys() <= {
        "position", *(f"encoder.layers.{layer}.norm{norm}" for layer in (0, 1) for norm in (1, 2)),
    }  # fmt: skip
    assert_computes_as(net, model, sentences())
    assert_computes_as(net, model, sentences(7, seed=1))  # another batch
    assert_takes_float_state(model, net.state_dict())


def test_without_an_example_its_layers_are_quantized_one_by_one() -> None:
    """torch's encoder decides on the sizes of its input, and in evaluation its fast path skips its own layers."""
    net = classifier(norm_first=False, padded=False).eval()
    model = qat.prepare(net)
    assert_computes_as(net, model, sentences())
    qat.calibrate(model, [sentences()])  # it refuses quantizers that saw nothing
    with torch.no_grad():
        found, wanted = model(sentences()), net(sentences())
    assert 1e-5 < float((found - wanted).square().mean().sqrt()) < 0.05 * float(wanted.square().mean().sqrt())
    assert integer_work(model, sentences()).share == 1.0


@pytest.mark.parametrize("way", ["nested", "causal"])
def test_the_ways_that_torchs_encoder_takes_by_itself_are_traced_too(way: str) -> None:
    """The encoder's fast path packs padded sentences, with zeros for the padding, and it checks if a mask is causal."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    above = torch.ones(LENGTH, LENGTH).triu(1).bool()

    def forward(self: Any, x: Tensor) -> Tensor:
        given = {"src_key_padding_mask": x[:, :, 0] > 1.0} if way == "nested" else {"mask": above}
        return self.encoder(x, **given)

    net, x = Plain(forward, encoder=encoder).eval(), draw(4, LENGTH, WIDTH)
    model = qat.prepare(net, example_inputs=x)
    assert "(the model)" not in noted(model, LEFT_IN_FLOAT)
    assert integer_work(model, x).share == 1.0
    assert_computes_as(net, model, x)


def test_all_products_run_on_integers() -> None:
    model = qat.prepare(classifier(True, True), example_inputs=sentences())
    work = integer_work(model, sentences())
    # Per layer: 4 projections of 16 x 16, two of 16 x 32, for 24 words; two products of 6 x 6 x 16 for 4 sentences.
    layer = 24 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 4 * 6 * 6 * 16
    assert work.total == 2 * layer + 4 * 16 * 3 and work.share == 1.0
    assert isinstance(model.embed, QuantEmbedding)
    assert sum(isinstance(module, QuantLayer) for module in model.modules()) == 1 + 2 * 6 + 1


def test_padding_words_have_no_influence() -> None:
    """A masked word is only a key for the others, so their results do not depend on it."""
    net = classifier(True, True).eval()
    words = sentences()
    model = qat.prepare(net, example_inputs=words)
    qat.calibrate(model, [words])
    before = model(words)
    with torch.no_grad():
        model.embed.weight[0] += 0.25 * model.embed.weight.abs().max(1).values.mean()
        net.embed.weight[0] += 0.25 * net.embed.weight.abs().max(1).values.mean()
    # The mean includes the results of the padding in both models; sentences without padding do not change.
    assert torch.equal(model(words)[1::2], before[1::2])


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_it_learns_a_small_task_and_keeps_it_in_evaluation(norm_first: bool) -> None:
    """Classify which of the words 1, 2, 3 is in the sentence; the float model is untrained."""
    labels = torch.arange(48) % 3
    words = torch.randint(4, WORDS, (48, LENGTH))
    words[torch.arange(48), torch.randint(0, LENGTH - 2, (48,))] = labels + 1
    words[::2, -1] = 0
    model = qat.prepare(classifier(norm_first, True, dropout=0.1).train(), example_inputs=words[:4])
    qat.calibrate(model, [words])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(words), labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    with torch.no_grad():
        assert float((model.eval()(words).argmax(1) == labels).float().mean()) > 0.9


def test_dropout_acts_in_training_only() -> None:
    model = qat.prepare(classifier(True, True, dropout=0.5), example_inputs=sentences())
    qat.calibrate(model, [sentences()])
    model.eval()
    assert torch.equal(model(sentences()), model(sentences()))
    model.train()
    assert not torch.equal(model(sentences()), model(sentences()))


def test_every_activation_is_calibrated_and_the_copy_agrees() -> None:
    net = classifier(True, True).eval()
    model = qat.prepare(net, example_inputs=sentences())
    qat.calibrate(model, [sentences(8, seed=seed) for seed in range(3)])
    quantizers = [model.get_submodule(name) for name in activation_quantizers(model)]
    assert all(isinstance(quantizer, Quantizer) and quantizer.is_calibrated for quantizer in quantizers)
    words = sentences(8, seed=9)
    with torch.no_grad():
        found, wanted = model(words), net(words)
        assert torch.equal(copy.deepcopy(model)(words), found)
    assert float((found - wanted).square().mean().sqrt()) < 0.05 * float(wanted.square().mean().sqrt())
