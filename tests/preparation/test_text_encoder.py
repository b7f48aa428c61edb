"""A transformer encoder for text: torch's nn.TransformerEncoder, prepared, calibrated and trained."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from benchmarks.work import integer_work
from qat.preparation.report import LEFT_IN_FLOAT, noted
from tests.references.prepared_case import Plain, assert_computes_as, assert_takes_float_state, draw

WORDS, LENGTH, WIDTH = 12, 6, 16


class TextClassifier(nn.Module):
    """Embedding, position, encoder, mean over the words, linear; word 0 is padding if the mask is passed."""

    def __init__(self, norm_first: bool, padded: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        nn.init.normal_(self.position, std=0.5)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
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


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_the_prepared_encoder_computes_as_torchs(norm_first: bool, padded: bool) -> None:
    net = TextClassifier(norm_first, padded).eval()
    model = qat.prepare(net, example_inputs=sentences())
    assert noted(model, LEFT_IN_FLOAT).keys() <= {
        "position", *(f"encoder.layers.{layer}.norm{norm}" for layer in (0, 1) for norm in (1, 2)),
    }  # fmt: skip
    assert_computes_as(net, model, sentences())
    assert_computes_as(net, model, sentences(7, seed=1))  # another batch
    assert_takes_float_state(model, net.state_dict())


def test_without_an_example_its_layers_are_quantized_one_by_one() -> None:
    """torch's encoder decides on the sizes of its input, and in evaluation its fast path skips its own layers."""
    net = TextClassifier(norm_first=False, padded=False).eval()
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
