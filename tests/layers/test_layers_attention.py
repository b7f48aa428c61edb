"""QuantMultiheadAttention: torch's results on fine grids, a NumPy reference on coarse ones, masks and the plumbing."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.layers.attention import QuantMultiheadAttention, operand_spec, probability_spec
from qat.layers.attention_core import additive_mask
from qat.quantizer import Quantizer
from qat.spec import QuantSpec, default_activation_spec
from tests.layers.twin_case import ATTENTIONS, CASES, Array, fine_twin, grid_codes, grid_product
from tests.references.rule_specs import plain

NARROW = plain(bits=4, narrow_range=True, rule="minmax")
AFFINE_PLUS = plain(signed=False, symmetric=False, rule="lsq_plus")
N, L, S = 3, 4, 6
EARLIER = torch.ones(L, S, dtype=torch.bool).triu(1)
SHORTER = torch.arange(S)[None] >= torch.tensor([6, 2, 4])[:, None]
CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "weights per head": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
    "padding": {"key_padding_mask": SHORTER},
    "padding in float": {"key_padding_mask": torch.where(SHORTER, -torch.inf, 0.5)},
    "mask": {"attn_mask": EARLIER},
    "causal": {"attn_mask": EARLIER, "is_causal": True, "need_weights": False},
    "mask in float": {"attn_mask": torch.linspace(-2, 2, L * S).reshape(L, S)},
    "both masks": {"attn_mask": EARLIER, "key_padding_mask": SHORTER, "average_attn_weights": False},
    "both masks, no weights": {"attn_mask": EARLIER, "key_padding_mask": SHORTER, "need_weights": False},
}
modules = pytest.mark.parametrize("module", ATTENTIONS)
calls = pytest.mark.parametrize("call", CALLS)


def fine_pair(module: str) -> tuple[nn.MultiheadAttention, QuantMultiheadAttention, Any]:
    """A float layer with biases that are not 0, its `fine_twin`, and inputs of N samples."""
    torch.manual_seed(0)
    case = CASES[f"attention, {module}"]
    layer = case.float_type(**case.arguments)
    with torch.no_grad():
        for bias in (layer.in_proj_bias, layer.out_proj.bias):
            if bias is not None:
                bias.normal_()
    return layer, fine_twin(layer), case.inputs()


def assert_same(got: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=2e-3, equal_nan=True)
    assert (got[1] is None) == (expected[1] is None)
    if got[1] is not None:
        torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-3, equal_nan=True)


@modules
@calls
def test_fine_grids_give_what_torch_gives(module: str, call: str) -> None:
    layer, twin, inputs = fine_pair(module)
    options = dict(CALLS[call])
    if layer.bias_k is not None or layer.add_zero_attn:
        options.pop("is_causal", None)  # with it torch masks the added keys too
    for mode in (True, False):
        assert_same(twin.train(mode)(*inputs, **CALLS[call]), layer.train(mode)(*inputs, **options))


@modules
def test_masks_of_each_head_and_inputs_without_a_batch(module: str) -> None:
    layer, twin, inputs = fine_pair(module)
    generator = torch.Generator().manual_seed(1)
    each = torch.rand(N * layer.num_heads, L, S, generator=generator) < 0.4
    each[..., 0] = False
    assert_same(twin(*inputs, attn_mask=each), layer(*inputs, attn_mask=each))
    alone = [x[0] if layer.batch_first else x[:, 0] for x in inputs]
    for options in ({}, {"key_padding_mask": SHORTER[1]}, {"attn_mask": EARLIER}, {"average_attn_weights": False}):
        assert_same(twin(*alone, **options), layer(*alone, **options))
    options = {"attn_mask": each[: layer.num_heads], "need_weights": False}
    assert_same(twin(*alone, **options), layer(*alone, **options))


def matmul(one: tuple[Array, Array], other: tuple[Array, Array]) -> Array:
    """Of two quantized tensors: int64 sums times both steps."""
    return (one[0].astype(np.int64) @ other[0].astype(np.int64)) * (one[1] * other[1])


def reference(twin: Any, inputs: list[Array], mask: Array, integers: bool) -> tuple[Array, Array]:
    """Output and probabilities for batch-first inputs and a mask (N, 1, L, S) of booleans."""
    heads = []
    for name, x, extra in zip(("query", "key", "value"), inputs, (None, twin.bias_k, twin.bias_v), strict=True):
        projection = f"{name}_projection"
        x = grid_product(twin.get_submodule(projection), x, *twin.inner_weights()[projection], integers)
        if extra is not None:
            x = np.concatenate([x, np.broadcast_to(extra.detach().numpy(), (len(x), 1, x.shape[-1]))], 1)
        if twin.add_zero_attn and name != "query":
            x = np.concatenate([x, np.zeros_like(x[:, :1])], 1)
        x = x.reshape(*x.shape[:2], twin.num_heads, -1).transpose(0, 2, 1, 3)
        heads.append(grid_codes(getattr(twin, f"{name}_quantizer"), x))
    query, (key, key_step), value = heads
    scores = matmul(query, (key.swapaxes(-2, -1), key_step)) / np.sqrt(query[0].shape[-1])
    columns = scores.shape[-1] - mask.shape[-1]
    mask = np.concatenate([mask, np.zeros((*mask.shape[:-1], columns), dtype=bool)], -1)
    powers = np.where(mask, 0.0, np.exp(scores - scores.max(-1, keepdims=True)))
    probabilities = grid_codes(twin.probability_quantizer, powers / powers.sum(-1, keepdims=True))
    mixed = matmul(probabilities, value).transpose(0, 2, 1, 3)
    mixed = mixed.reshape(*mixed.shape[:2], -1)
    output = grid_product(twin.out_proj, mixed, twin.out_proj.weight, twin.out_proj.bias, integers)
    return output, probabilities[0] * probabilities[1]


@modules
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_coarse_grids_give_what_numpy_gives(module: str, bits: int, mode: str) -> None:
    """In evaluation the reference computes in int64; the layer's bias and unit are float32."""
    torch.manual_seed(1)
    weight, spec = QuantSpec(bits=bits), QuantSpec(bits=bits, signed=False, symmetric=False)
    case = CASES[f"attention, {module}"]
    arguments = {**case.arguments, "batch_first": True, "dtype": torch.float64}
    twin = QuantMultiheadAttention(**arguments, weight_spec=weight, activation_spec=spec)
    inputs = tuple(x.double() if "batch_first" in case.arguments else x.double().transpose(0, 1) for x in case.inputs())
    qat.calibrate(twin, [(inputs,)])
    twin.train(mode == "train")
    mask = SHORTER[:, None, None] | EARLIER
    expected = reference(twin, [x.numpy() for x in inputs], mask.numpy(), mode == "eval")
    got = twin(*inputs, key_padding_mask=SHORTER, attn_mask=EARLIER, average_attn_weights=False)
    tolerance = 1e-9 if mode == "train" else 3e-6
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=0, atol=tolerance)


@calls
def test_masked_probabilities_are_exactly_zero(call: str) -> None:
    twin, inputs = QuantMultiheadAttention(8, 2), CASES["attention, plain"].inputs()
    qat.calibrate(twin, [(inputs,)])
    options = {**CALLS[call], "need_weights": True, "average_attn_weights": False}
    weights = twin(*inputs, **options)[1]
    mask = additive_mask(options.get("attn_mask"), options.get("key_padding_mask"), 2, torch.float32)
    assert mask is None or additive_mask(EARLIER, SHORTER, 2, torch.bfloat16).dtype == torch.bfloat16
    masked = torch.zeros_like(weights) if mask is None else mask.expand_as(weights)
    assert bool((weights[masked == -torch.inf] == 0).all())
    assert bool(((weights == 0) & (masked != -torch.inf)).float().mean() < 0.2), "and the others are not"


@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_masked_entirely_are_what_torch_makes_of_them(need_weights: bool) -> None:
    """Fully masked rows: NaN with need_weights, zeros before out_proj without."""
    layer, twin, inputs = fine_pair("plain")
    mask = EARLIER.clone()
    mask[1] = True
    options = {"attn_mask": mask, "need_weights": need_weights}
    for mode in (True, False):
        got = twin.train(mode)(*inputs, **options)
        assert bool(got[0][1].isnan().all()) == need_weights and not bool(got[0][0].isnan().any())
        assert_same(got, layer.train(mode)(*inputs, **options))


def test_rows_masked_entirely_keep_gradients_finite() -> None:
    twin = QuantMultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(N, L, 8)
    qat.calibrate(twin, [((x, x, x),)])
    x.requires_grad_()
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1] = True
    twin.train()(x, x, x, key_padding_mask=padding, need_weights=False)[0].square().sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in twin.parameters())]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(("spec", "operand", "probability"), [
    (default_activation_spec(), default_activation_spec(), plain(signed=False, init="mse")),
    (NARROW, NARROW, plain(bits=4, signed=False, rule="minmax")),
    (AFFINE_PLUS, AFFINE_PLUS, plain(signed=False)),
    (plain(signed=False, rule="pact"), plain(), plain(signed=False, rule="pact")),
    (plain(rule="fp8_e4m3"), plain(rule="fp8_e4m3"), plain(rule="fp8_e4m3")),
])  # fmt: skip
def test_grids_of_the_products(spec: QuantSpec, operand: QuantSpec, probability: QuantSpec) -> None:
    assert operand_spec(spec) == operand and probability_spec(spec) == probability
    twin = QuantMultiheadAttention(8, 2, activation_spec=spec)
    used = {name: part.spec for name, part in twin.named_modules() if isinstance(part, Quantizer)}
    assert used["key_quantizer"] == operand and used["probability_quantizer"] == probability
    assert used["value_projection.input_quantizer"] == used["out_proj.input_quantizer"] == spec


def test_torchs_encoder_layer_takes_no_way_around_it() -> None:
    """In evaluation without gradients torch tries to compute a whole layer in one float operation."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.self_attn = QuantMultiheadAttention.from_float(layer.self_attn, activation_spec=QuantSpec(bits=2))
    x = torch.randn(N, L, 8)
    qat.calibrate(layer, [x])
    with torch.no_grad():
        trained, evaluated = layer.train()(x), layer.eval()(x)
        layer.self_attn = layer.self_attn.to_float().eval()
        plain = layer(x)
    torch.testing.assert_close(evaluated, trained, rtol=0, atol=1e-3)
    assert not torch.allclose(evaluated, plain, atol=0.05)
