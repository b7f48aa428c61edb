"""nn.MultiheadAttention and F.scaled_dot_product_attention in a prepared graph: torch's values, grids everywhere."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from benchmarks.work import integer_work
from qat.layers import QuantLayer
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from tests.references import prepared_case as checks
from tests.references.prepared_case import Plain, assert_computes_as, draw, prepared_alike, prepared_whole

LENGTH = 5
FORBIDDEN = torch.ones(LENGTH, LENGTH).triu(1).bool()
MINUS_INFINITY = torch.zeros(LENGTH, LENGTH).masked_fill(FORBIDDEN, -math.inf)
PADDING = torch.tensor([[False] * LENGTH, [False] * 3 + [True] * 2])
BATCH, SEQUENCE = draw(2, LENGTH, 8), draw(LENGTH, 8)


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **options)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
    return module


def self_attention(**given: Any) -> Callable[[Any, Tensor], Any]:
    return lambda self, x: self.a(x, x, x, **given)


first = {"batch_first": True}
MULTI_HEAD: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], Tensor]] = {
    "batch first": (self_attention(), first, BATCH),
    "sequence first": (self_attention(), {}, BATCH),
    "unbatched": (self_attention(), {}, SEQUENCE),
    "without weights": (self_attention(need_weights=False), first, BATCH),
    "weights of every head": (self_attention(average_attn_weights=False), first, BATCH),
    "cross": (lambda self, x: self.a(x[:, :3], x, x.flip(1)), first, BATCH),
    "other sizes": (lambda self, x: self.a(x, x[..., :4], x[..., 2:]), {**first, "kdim": 4, "vdim": 6}, BATCH),
    "without bias": (self_attention(), {**first, "bias": False}, BATCH),
    "mask of booleans": (self_attention(attn_mask=FORBIDDEN), first, BATCH),
    "mask of numbers": (self_attention(attn_mask=MINUS_INFINITY), first, BATCH),
    "mask of every head": (self_attention(attn_mask=FORBIDDEN.expand(4, -1, -1)), first, BATCH),
    "causal": (self_attention(attn_mask=MINUS_INFINITY, is_causal=True, need_weights=False), first, BATCH),
    "padding": (self_attention(key_padding_mask=PADDING), first, BATCH),
    "padding and mask": (
        self_attention(key_padding_mask=PADDING, attn_mask=FORBIDDEN, need_weights=False), first, BATCH,
    ),
    "dropout": (self_attention(), {**first, "dropout": 0.3}, BATCH),
    "called twice": (lambda self, x: self.a(self.a(x, x, x)[0], x, x)[0], first, BATCH),
}  # fmt: skip


@pytest.mark.parametrize("case", MULTI_HEAD)
def test_multi_head_attention_computes_as_torchs(case: str) -> None:
    forward, options, x = MULTI_HEAD[case]
    net = Plain(forward, a=attention(**options)).eval()
    model = prepared_alike(net, x)
    assert notes_of(model, LEFT_IN_FLOAT) == {}
    checks.assert_takes_float_state(model, net.state_dict())


@pytest.mark.parametrize("case", ["batch first", "sequence first", "mask of booleans", "dropout", "other sizes"])
def test_multi_head_attention_without_an_example_computes_as_torchs(case: str) -> None:
    forward, options, x = MULTI_HEAD[case]
    net = Plain(forward, a=attention(**options)).eval()
    assert_computes_as(net, qat.prepare(net), x)


def test_every_operand_of_attention_is_on_a_grid() -> None:
    net = Plain(lambda self, x: self.a(x, x, x, need_weights=False)[0], a=attention(**first)).eval()
    model = prepared_whole(net, BATCH)
    layers = [name for name, module in model.named_modules() if isinstance(module, QuantLayer)]
    assert sorted(layers) == ["a.key_projection", "a.out_proj", "a.query_projection", "a.value_projection"]
    # The input; q, k and v; the probabilities; the input of out_proj.
    assert len(checks.activation_quantizers(model)) == 6
    work = integer_work(model, BATCH)
    # 4 projections of 8 x 8 for 10 tokens, and two products of 5 x 5 x 8 for 2 samples.
    assert work.total == 10 * 4 * 64 + 2 * 2 * 25 * 8 and work.share == 1.0


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_with_extra_keys_computes_as_torchs(option: str) -> None:
    model = prepared_alike(Plain(self_attention(), a=attention(batch_first=True, **{option: True})).eval(), BATCH)
    assert any(isinstance(module, QuantLayer) for module in model.modules())


HEADS = draw(2, 4, LENGTH, 6)

PRODUCTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "mask of booleans": {"attn_mask": ~FORBIDDEN},
    "mask of numbers": {"attn_mask": MINUS_INFINITY},
    "causal": {"is_causal": True},
    "causal, fewer queries": {"is_causal": True},
    "grouped queries": {"enable_gqa": True},
    "dropout": {"dropout_p": 0.4},
}


def product(case: str) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        queries = x[..., :3, :] if "fewer" in case else x
        keys = x[:, :2] if "grouped" in case else x
        given = {name: value for name, value in PRODUCTS[case].items() if self.training or name != "dropout_p"}
        return F.scaled_dot_product_attention(self.q(queries), self.k(keys), self.v(keys), **given)

    return Plain(forward, **{name: nn.Linear(6, 6) for name in "qkv"}).eval()


@pytest.mark.parametrize("case", PRODUCTS)
def test_scaled_dot_product_attention_is_taken_apart(case: str) -> None:
    model = prepared_whole(product(case), HEADS)
    operands, found = {"input_quantizer", *(f"{name}_quantizer" for name in "kqv")}, checks.activation_quantizers(model)
    assert operands < set(found) and len(found) == 5  # probabilities
    assert integer_work(model, HEADS).share == 1.0


def test_attention_takes_other_batches_and_lengths() -> None:
    net = Plain(self_attention(), a=attention(**first)).eval()
    model = checks.without_quantizers(qat.prepare(net, example_inputs=BATCH))
    for shape in ((7, LENGTH, 8), (1, LENGTH, 8), (2, 9, 8)):
        x = draw(*shape)
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnnpack", "integer_only"])
def test_masks_are_no_tensors_to_quantize_on_any_target(target: Any) -> None:
    for case in ("mask of booleans", "mask of numbers", "causal"):
        checks.prepared_near(product(case), HEADS, qat.QuantRecipe(target=target))


WORDS, SENTENCE, WIDTH = 12, 6, 16


def text_classifier(norm_first: bool, padded: bool) -> nn.Module:
    """Embedding, position, encoder, mean over the words, linear; word 0 is padding if the mask is passed."""

    def forward(self: Any, words: Tensor) -> Tensor:
        mask = words == 0 if padded else None
        return self.head(self.encoder(self.embed(words) + self.position, src_key_padding_mask=mask).mean(1))

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    position = nn.Parameter(torch.zeros(1, SENTENCE, WIDTH))
    embed, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
    return Plain(forward, position=position, embed=embed, encoder=encoder, head=head).eval()


def sentences(count: int = 4, seed: int = 0) -> Tensor:
    """Words from 1 on; the last third of every other sentence is padding."""
    words = torch.randint(1, WORDS, (count, SENTENCE), generator=torch.Generator().manual_seed(seed))
    words[::2, -2:] = 0
    return words


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_the_prepared_encoder_computes_as_torchs(norm_first: bool, padded: bool) -> None:
    net = text_classifier(norm_first, padded)
    model = prepared_alike(net, sentences())
    norms = {f"encoder.layers.{layer}.norm{norm}" for layer in (0, 1) for norm in (1, 2)}
    assert notes_of(model, LEFT_IN_FLOAT).keys() <= {"position", *norms}
    assert_computes_as(net, model, sentences(7, seed=1))  # another batch
    checks.assert_takes_float_state(model, net.state_dict())


def test_without_an_example_its_layers_are_quantized_one_by_one() -> None:
    """torch's encoder decides on the sizes of its input, and in evaluation its fast path skips its own layers."""
    net = text_classifier(norm_first=False, padded=False)
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
    above = torch.ones(SENTENCE, SENTENCE).triu(1).bool()

    def forward(self: Any, x: Tensor) -> Tensor:
        given = {"src_key_padding_mask": x[:, :, 0] > 1.0} if way == "nested" else {"mask": above}
        return self.encoder(x, **given)

    x = draw(4, SENTENCE, WIDTH)
    model = prepared_alike(Plain(forward, encoder=encoder).eval(), x)
    assert "(the model)" not in notes_of(model, LEFT_IN_FLOAT)
    assert integer_work(model, x).share == 1.0


def test_a_size_that_reshapes_many_tensors_makes_them_no_views_of_each_other() -> None:
    """MViT: a norm is read before and after a write into a product whose shape was taken from it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(x)
        batch, rows, width = y.shape
        q = self.a(y).reshape(batch, rows, width)
        z = q @ q.transpose(1, 2)
        z[:, 1:] += q[:, 1:, :rows]
        return self.b(y) + self.c(z.reshape(batch, rows, rows)).sum()  # type: ignore[no-any-return]

    net = Plain(forward, norm=nn.LayerNorm(8), a=nn.Linear(8, 8), b=nn.Linear(8, 4), c=nn.Linear(5, 4))
    x = torch.randn(2, 5, 8)
    model = qat.prepare(net.eval(), example_inputs=x)
    qat.calibrate(model, [x])
    assert torch.allclose(model(x), net(x), rtol=0.1, atol=0.5)
