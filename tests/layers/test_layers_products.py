"""Layers of one product (linear, convolutions): torch's layer on quantized operands, and on integers.

The reference is torch's own layer in float64, where sums of these integers are exact.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qat
from qat.layers import QuantConv2d, QuantLayer, fold_weight
from qat.spec import QuantSpec
from tests.layers.twin_case import CASES, SHAPES, Case, convolution, grid_for, trained_norm

PRODUCTS = {name: case for name, case in CASES.items() if getattr(case.twin_type, "has_input_grid", False)}
every_product = pytest.mark.parametrize("case", PRODUCTS.values(), ids=PRODUCTS)


class Example:
    """A layer, an input on a grid, and the integers of its weight by the formula."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.layer: Any = case.twin_type(**case.arguments, activation_spec=None)
        (raw,) = case.inputs()
        self.grid = grid_for(raw)
        self.input = self.grid(raw).detach()
        scale = self.layer.weight_quantizer.scale.detach()
        self.scale = scale.flatten().double()
        rows = torch.clamp(torch.round(self.layer.channels_first(self.layer.weight.detach()) / scale), -127, 127)
        self.codes, self.quantized = self.layer.torch_layout(rows), self.layer.torch_layout(rows * scale)

    def plain(self, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        layer = self.case.float_type(**{**self.case.arguments, "bias": bias is not None}, dtype=torch.float64)
        layer.weight.data.copy_(weight)
        if bias is not None:
            layer.bias.data.copy_(bias)
        y: Tensor = layer(x.double()).detach()
        return y

    def column(self, values: Tensor) -> Tensor:
        """One value for each output channel, which of images is the second axis."""
        return values.reshape(-1, *[1] * (self.input.dim() - 2)) if self.input.dim() > 2 else values


@every_product
def test_training_is_torchs_layer_on_quantized_operands(case: Case) -> None:
    example = Example(case)
    expected = example.plain(example.quantized, example.input, example.layer.bias).float()
    for layer in (example.layer.train(), example.layer.eval()):  # evaluated without the grid of its input
        torch.testing.assert_close(layer(example.input), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
@every_product
def test_evaluation_is_integer_arithmetic(case: Case, with_norm: bool) -> None:
    example = Example(case)
    layer, channels, images = example.layer.eval(), len(example.scale), example.input.dim() > 2
    if with_norm and not images:
        return
    norm = trained_norm(channels, example.input.dim() - 2) if with_norm else None
    step = example.grid.scale.item()
    total = example.plain(example.codes, (example.input.double() / step).round(), None)
    gain, shift = torch.ones(channels).double(), torch.zeros(channels).double()
    if layer.bias is not None:
        shift = layer.bias.detach().double()
    if norm is not None:
        gain = norm.weight.detach().double() / torch.sqrt(norm.running_var.double() + norm.eps)
        shift = (shift - norm.running_mean.double()) * gain + norm.bias.detach().double()
    unit = gain.abs() * example.scale * step
    exact = total * example.column(gain.sign() * unit) + example.column(shift)
    got = layer(example.input, example.grid, norm).detach().double()
    # The bias is rounded to a multiple of the unit; the rest is exact in float32.
    assert bool(((got - exact).abs() <= example.column(0.5001 * unit) + 3e-7 * exact.abs() + 1e-6).all())
    found = layer.integers(example.grid, norm)
    rounded = found.bias_codes.detach().double()
    assert torch.equal(rounded, rounded.round())
    alive = unit > 0
    if norm is None:
        assert torch.equal(found.codes, layer.channels_first(example.codes))
        torch.testing.assert_close(rounded, (shift / unit).round(), rtol=1e-6, atol=1.0)
    deployed = (total * example.column(gain.sign()) + example.column(rounded)) * example.column(unit)
    axis = 1 if images else -1
    got, deployed = (part.movedim(axis, 0)[alive] for part in (got, deployed))
    torch.testing.assert_close(got, deployed, rtol=5e-7, atol=1e-6)


def twin(axes: int, transposed: bool) -> Any:
    return getattr(qat.layers, f"Quant{convolution(axes, transposed).__name__}")


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_torch_layout_is_the_inverse_of_channels_first(axes: int, groups: int) -> None:
    weight = torch.randn(12, 18 // groups, *range(2, 2 + axes))
    layer = twin(axes, True)(12, 18, tuple(range(2, 2 + axes)), groups=groups, activation_spec=None)
    rows = layer.channels_first(weight)
    assert rows.shape == (18, 12 // groups, *range(2, 2 + axes))
    assert torch.equal(layer.torch_layout(rows), weight)
    for index in np.ndindex(12, 18 // groups):
        group, within = divmod(index[0], 12 // groups)
        assert torch.equal(rows[group * (18 // groups) + index[1], within], weight[index])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_unbatched_inputs(axes: int, transposed: bool, training: bool) -> None:
    layer = twin(axes, transposed)(8, 12, 3, padding=1, activation_spec=None).train(training)
    raw = torch.randn(2, 8, *SHAPES[axes])
    grid = grid_for(raw)
    x = grid(raw)
    torch.testing.assert_close(layer(x[1], grid), layer(x, grid)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_output_size_is_a_keyword(axes: int) -> None:
    layer, raw = twin(axes, True)(8, 12, 3, stride=2, activation_spec=None), torch.randn(2, 8, *SHAPES[axes])
    grid = grid_for(raw)
    x = grid(raw).detach()
    size = tuple(2 * n + 2 for n in SHAPES[axes])
    for mode in (layer.train(), layer.eval()):
        assert mode(x, grid, output_size=size).shape == (2, 12, *size)
        smaller = mode(x, grid)
        inner = tuple(slice(0, n) for n in smaller.shape[2:])
        assert torch.equal(mode(x, grid, output_size=torch.Size((2, 12, *size)))[(..., *inner)], smaller)


@pytest.mark.parametrize(("axes", "transposed"), [(1, False), (2, True), (3, True)])
def test_a_scale_per_group_of_inputs(axes: int, transposed: bool) -> None:
    """Groups are along the input axis of channels_first, so they never mix output channels."""
    spec = QuantSpec(bits=4, granularity="group", group_size=2, init="minmax")
    layer = twin(axes, transposed)(8, 6, 3, groups=2, activation_spec=None, weight_spec=spec)
    assert layer.weight_quantizer.scale.shape == (6, 2, *[1] * (axes + 1))
    quantized = layer.quantized(layer.weight).detach()
    assert not torch.equal(quantized, layer.weight)
    torch.testing.assert_close(quantized, layer.weight, rtol=0, atol=layer.weight_quantizer.scale.max().item() * 0.501)


@pytest.mark.parametrize("spec", [QuantSpec(granularity="group", group_size=1), QuantSpec(bits=4, rule="apot")])
@every_product
def test_without_integers_a_layer_is_evaluated_as_trained(case: Case, spec: QuantSpec) -> None:
    layer: QuantLayer = case.twin_type(**case.arguments, weight_spec=spec, activation_spec=None)
    (x,) = case.inputs()
    grid = grid_for(x)
    torch.testing.assert_close(layer.train()(x, grid), layer.eval()(x, grid), rtol=0, atol=0)


def test_gamma_zero_and_negative_gamma_are_exact() -> None:
    torch.manual_seed(2)
    layer = QuantConv2d(4, 3, 3, bias=False, activation_spec=None).eval()
    norm = trained_norm(3)
    raw = torch.rand(1, 4, 6, 6)
    grid = grid_for(raw)
    integers = layer.integers(grid, norm)
    unfolded = layer.weight_quantizer.codes(layer.weight)
    assert bool((integers.codes[0] == 0).all()), "gamma = 0 leaves the bias alone"
    assert torch.equal(integers.codes[1], -unfolded[1]), "gamma < 0 negates the integers"
    assert torch.equal(integers.codes[2].abs(), unfolded[2].abs())
    assert bool((integers.scale > 0).all()) and bool(torch.isfinite(integers.bias_codes).all())
    y = layer(grid(raw), grid, norm)
    torch.testing.assert_close(y[:, 0], norm.bias[0].expand_as(y[:, 0]), rtol=1e-6, atol=0)


def test_a_bias_beyond_int32_shrinks_the_codes_not_the_bias() -> None:
    codes, scale = torch.tensor([[100.0], [100.0]]), torch.tensor([[1e-12], [1.0]])
    integers = fold_weight(codes, scale, torch.tensor([5.0, 5.0]), torch.tensor(1e-3))
    assert float(integers.bias_codes.abs().max()) <= 2**30
    torch.testing.assert_close(integers.bias_codes * integers.accumulator_scale, torch.tensor([5.0, 5.0]))
    assert integers.codes[1].item() == 100 and integers.scale[1].item() == 1.0


def test_bias_and_products_fit_int32_together() -> None:
    codes = torch.full((1, 60_000), 127.0)  # 255 times their sum is nine tenths of the int32 maximum
    integers = fold_weight(codes, torch.tensor([[1.0]]), torch.tensor([3e8]), torch.tensor(1.0))
    assert float(integers.bias_codes) + 255 * float(integers.codes.sum()) < 2**31
    torch.testing.assert_close(integers.bias_codes * integers.accumulator_scale, torch.tensor([3e8]))
