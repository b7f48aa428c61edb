"""QuantEmbedding: a table of integers, read row by row."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.layers import QuantEmbedding
from qat.quantizer import create_quantizer
from qat.spec import QuantSpec
from tests.layers.twin_case import assert_learns
from tests.references.rule_specs import plain

SPECS = {
    "row": None,
    "tensor": QuantSpec(bits=4, granularity="tensor"),
    "affine": QuantSpec(bits=4, symmetric=False),
    "affine tensor": QuantSpec(bits=4, symmetric=False, granularity="tensor"),
}
WHOLE_TABLE = {
    "ewgs": QuantSpec(bits=4, ewgs="fixed"),
    "group": QuantSpec(bits=4, granularity="group", group_size=2),
    "minmax": QuantSpec(rule="minmax"),
    "dorefa": QuantSpec(bits=4, rule="dorefa", granularity="tensor"),
    "lsq_plus": plain(bits=4, rule="lsq_plus", symmetric=False, init="percentile", percentile=90),
    "apot": QuantSpec(bits=4, rule="apot", granularity="tensor"),
    "ternary": QuantSpec(bits=2, rule="ternary"),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"padding_idx": 0},
    {"padding_idx": -3},
    {"scale_grad_by_freq": True},
    {"max_norm": 1.5},
    {"max_norm": 2.0, "norm_type": 1.0, "padding_idx": 1, "scale_grad_by_freq": True},
]
INDICES = torch.tensor([[1, 2, 0, 7], [7, 7, 9, 0], [3, 1, 7, 7]])


def whole_table(layer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The quantized table of a copy of the layer's parameters, with its own quantizer, and these parameters."""
    quantizer = create_quantizer(layer.weight_quantizer.spec, "weight", layer.weight_quantizer.shape)
    quantizer.load_state_dict(layer.weight_quantizer.state_dict())
    weight = layer.weight.detach().clone().requires_grad_()
    return quantizer(weight), {"weight": weight, **dict(quantizer.named_parameters(prefix="weight_quantizer"))}


def check_gradients(layer: nn.Module, expected: dict[str, Tensor]) -> None:
    """The layer's gradients are finite, not all zero, and equal to those of the other parameters."""
    found = dict(layer.named_parameters())
    assert set(found) == set(expected)
    assert_learns(layer)
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad.to_dense(), expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def renormed(weight: Tensor, indices: Tensor, options: dict[str, Any]) -> np.ndarray:
    """The float table after a look-up: every row that is looked up and too long is shortened."""
    table = weight.detach().numpy().astype(np.float64)
    limit, power = options.get("max_norm"), options.get("norm_type", 2.0)
    for row in np.unique(indices.numpy()) if limit is not None else ():
        norm = (np.abs(table[row]) ** power).sum() ** (1 / power)
        if norm > limit:
            table[row] *= limit / (norm + 1e-7)
    return table


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spec", [*SPECS, *WHOLE_TABLE])
def test_embedding_is_torchs_on_a_quantized_table(spec: str, options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    layer = QuantEmbedding(11, 6, **options, weight_spec={**SPECS, **WHOLE_TABLE}[spec]).train(training)
    before = layer.weight.detach().clone()
    probe = torch.randn(3, 4, 6)
    y = layer(INDICES)
    np.testing.assert_allclose(layer.weight.detach().numpy(), renormed(before, INDICES, options), rtol=1e-5, atol=1e-7)
    table, parameters = whole_table(layer)
    expected = F.embedding(INDICES, table, layer.padding_idx, None, 2.0, layer.scale_grad_by_freq)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    (y * probe).sum().backward()
    (expected * probe).sum().backward()
    check_gradients(layer, parameters)


@pytest.mark.parametrize("spec", [name for name in {**SPECS, **WHOLE_TABLE} if name != "apot"])
def test_integers_stand_for_the_table(spec: str) -> None:
    torch.manual_seed(0)
    layer = QuantEmbedding(11, 6, weight_spec={**SPECS, **WHOLE_TABLE}[spec])
    integers = layer.integers()
    low, high = layer.weight_quantizer.bounds()
    codes = integers.codes.numpy().astype(np.int64)
    assert bool((codes == integers.codes.numpy()).all()) and codes.min() >= low and codes.max() <= high
    if spec == "group":
        values = codes * np.repeat(integers.scale.double().numpy()[:, :, 0], 2, axis=1)
    else:
        values = (codes - integers.zero_point.double().numpy()) * integers.scale.double().numpy()
    np.testing.assert_allclose(layer(torch.arange(11)).detach().numpy(), values, rtol=1e-6, atol=1e-7)


def test_look_ups_of_none_and_of_one() -> None:
    assert QuantEmbedding(11, 6)(torch.empty(0, dtype=torch.long)).shape == (0, 6)
    assert QuantEmbedding(11, 6)(torch.tensor(3)).shape == (6,)


def test_integers_hold_rows_that_max_norm_has_yet_to_shorten() -> None:
    torch.manual_seed(0)
    layer = QuantEmbedding(11, 6, max_norm=0.5).eval()
    before = layer.weight.detach().clone()
    integers = layer.integers()
    assert torch.equal(layer.weight, before), "integers() changes the table"
    assert bool((integers.codes.abs().amax(1) == 127).all()), "the range is that of the shortened rows"
    torch.testing.assert_close(layer(torch.arange(11)), integers.codes * integers.scale, rtol=1e-6, atol=1e-7)
    assert layer.weight.norm(dim=1).max().item() < 0.5001


def test_two_lookups_with_max_norm_in_one_step() -> None:
    for spec in (None, QuantSpec(rule="minmax")):
        layer = QuantEmbedding(11, 6, max_norm=0.5, weight_spec=spec)
        (layer(INDICES).sum() + layer(INDICES + 1).square().sum()).backward()
        assert layer.weight.grad is not None and bool(layer.weight.grad.isfinite().all())


def test_rows_that_are_not_looked_up_stay_untouched() -> None:
    layer = QuantEmbedding(11, 6, padding_idx=0)
    with torch.no_grad():
        layer.weight[5] = float("nan")  # this row must not be read
    layer(INDICES).square().sum().backward()
    seen = torch.zeros(11, dtype=torch.bool)
    seen[INDICES.reshape(-1)] = True
    seen[0] = False
    scale = layer.weight_quantizer.scale
    assert layer.weight.grad is not None and scale.grad is not None
    assert torch.equal((layer.weight.grad != 0).any(1), seen)
    assert torch.equal((scale.grad != 0)[:, 0], seen)


def test_a_broken_scale_is_repaired_in_training() -> None:
    layer = QuantEmbedding(11, 6)
    before = layer(INDICES)
    with torch.no_grad():
        layer.weight_quantizer.scale[7] = float("nan")
    torch.testing.assert_close(layer(INDICES), before, rtol=1e-6, atol=1e-6)
    assert bool(layer.weight_quantizer.scale.isfinite().all())


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    layer, dense = QuantEmbedding(11, 6, sparse=True), QuantEmbedding(11, 6)
    dense.load_state_dict(layer.state_dict())
    probe = torch.randn(dense(INDICES).shape)
    for either in (layer, dense):
        (either(INDICES) * probe).sum().backward()
    assert layer.weight.grad.is_sparse and not layer.weight_quantizer.scale.grad.is_sparse
    check_gradients(layer, dict(dense.named_parameters()))
    torch.optim.SparseAdam([layer.weight], lr=0.1).step()
    assert not torch.equal(layer.weight, dense.weight)


def test_a_hook_on_the_quantizer_sees_the_whole_table() -> None:
    layer = QuantEmbedding(11, 6)
    plain = layer(INDICES)
    seen: list[Tensor] = []
    layer.weight_quantizer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert torch.equal(layer(INDICES), plain)
    assert len(seen) == 1 and seen[0].shape == (11, 6)


def test_from_pretrained_makes_a_quantized_table() -> None:
    values = torch.randn(4, 3)
    layer = QuantEmbedding.from_pretrained(values, padding_idx=1)
    assert isinstance(layer, QuantEmbedding) and not layer.weight.requires_grad and layer.padding_idx == 1
    torch.testing.assert_close(layer(torch.arange(4)), values, rtol=0.01, atol=0.02)


def test_a_table_that_saw_no_values_warns_like_any_quantizer() -> None:
    layer = QuantEmbedding(11, 6, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.warns(UserWarning, match=r"runs on its default range"):
        layer(INDICES)
    layer.calibrate_weight()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(INDICES)
