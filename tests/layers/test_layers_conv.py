"""Convolutions and transposed convolutions of one, two and three axes, against torch's layers and NumPy's integers."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from twin_case import GEOMETRIES, SHAPES, convolution, grid_for, trained_norm

import qat
from qat.spec import QuantSpec

CASES = [(axes, *geometry) for axes in (1, 2, 3) for geometry in GEOMETRIES]


def twin(axes: int, transposed: bool) -> Any:
    return getattr(qat.layers, f"Quant{convolution(axes, transposed).__name__}")


def example(axes: int, transposed: bool, options: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """A layer from 8 to 12 channels and an input for it."""
    torch.manual_seed(axes)
    return twin(axes, transposed)(8, 12, **options, activation_spec=None), torch.randn(2, 8, *SHAPES[axes])


def output_channel(weight_shape: tuple[int, ...], index: tuple[int, ...], groups: int, transposed: bool) -> int:
    """The output channel to which one element of torch's weight contributes."""
    if not transposed:
        return index[0]
    return index[0] // (weight_shape[0] // groups) * weight_shape[1] + index[1]


def reference_codes(weight: np.ndarray, scales: np.ndarray, groups: int, transposed: bool) -> np.ndarray:
    """Integers of the weight in torch's layout, element by element."""
    codes = np.empty(weight.shape, np.int64)
    for index in np.ndindex(*weight.shape):
        scale = scales[output_channel(weight.shape, index, groups, transposed)]
        codes[index] = np.clip(np.round(weight[index] / scale), -127, 127)
    return codes


def offsets(layer: Any, counts: list[int]) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Every tap of the kernel, with the positions of the larger tensor that it touches, `counts` along each axis."""
    taps = []
    for tap in itertools.product(*[range(size) for size in layer.kernel_size]):
        starts = [d * t for d, t in zip(layer.dilation, tap, strict=True)]
        spans = zip(starts, layer.stride, counts, strict=True)
        taps.append((tap, tuple(slice(start, start + step * (n - 1) + 1, step) for start, step, n in spans)))
    return taps


def reference_conv(layer: Any, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A convolution on int64, tap by tap and group by group."""
    mode = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}[layer.padding_mode]
    padded = np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in layer.padding]], mode=mode)  # type: ignore[call-overload]
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    counts = [(n - r - 1) // s + 1 for n, r, s in zip(padded.shape[2:], reach, layer.stride, strict=True)]
    groups = zip(np.split(padded, layer.groups, axis=1), np.split(weight, layer.groups, axis=0), strict=True)
    parts = []
    for part, rows in groups:
        total = np.zeros((x.shape[0], rows.shape[0], *counts), np.int64)
        for tap, places in offsets(layer, counts):
            total += np.einsum("nc...,oc->no...", part[(..., *places)], rows[(..., *tap)])
        parts.append(total)
    return np.concatenate(parts, axis=1)


def reference_conv_transpose(layer: Any, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A transposed convolution on int64: every input is added to the positions that it reaches."""
    geometry = zip(x.shape[2:], layer.stride, layer.dilation, layer.kernel_size, layer.output_padding, strict=True)
    sizes = [(n - 1) * s + d * (k - 1) + 1 + rest for n, s, d, k, rest in geometry]
    parts = []
    for part, rows in zip(np.split(x, layer.groups, axis=1), np.split(weight, layer.groups, axis=0), strict=True):
        total = np.zeros((x.shape[0], rows.shape[1], *sizes), np.int64)
        for tap, places in offsets(layer, list(x.shape[2:])):
            total[(..., *places)] += np.einsum("nc...,co->no...", part, rows[(..., *tap)])
        parts.append(total)
    crop = tuple(slice(p, size - p) for p, size in zip(layer.padding, sizes, strict=True))
    return np.concatenate(parts, axis=1)[(..., *crop)]


@pytest.mark.parametrize(("axes", "transposed", "options"), CASES)
def test_training_is_torchs_layer_on_quantized_operands(axes: int, transposed: bool, options: dict[str, Any]) -> None:
    layer, raw = example(axes, transposed, options)
    x = grid_for(raw)(raw).detach()
    scales = layer.weight_quantizer.scale.detach().flatten().numpy()
    codes = reference_codes(layer.weight.detach().numpy(), scales, layer.groups, transposed)
    plain = layer.float_type(8, 12, **options)
    with torch.no_grad():
        for index in np.ndindex(*codes.shape):
            scale = scales[output_channel(codes.shape, index, layer.groups, transposed)]
            plain.weight[index] = float(codes[index] * scale)
        if plain.bias is not None:
            plain.bias.copy_(layer.bias)
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("axes", "transposed", "options"), CASES)
def test_evaluation_is_integer_arithmetic(
    axes: int, transposed: bool, options: dict[str, Any], with_norm: bool
) -> None:
    layer, raw = example(axes, transposed, options)
    layer.eval()
    norm = trained_norm(12, axes) if with_norm else None
    grid = grid_for(raw)
    x = grid(raw).detach()
    scale_x = grid.scale.item()
    scales = layer.weight_quantizer.scale.detach().flatten().numpy()
    codes = reference_codes(layer.weight.detach().numpy(), scales, layer.groups, transposed)
    reference = reference_conv_transpose if transposed else reference_conv
    x_codes = (x.double() / scale_x).round().numpy().astype(np.int64)
    total = reference(layer, x_codes, codes)
    gain, shift = np.ones(12), np.zeros(12)
    if layer.bias is not None:
        shift = layer.bias.detach().double().numpy()
    if norm is not None:
        gain = (norm.weight.detach().double() / torch.sqrt(norm.running_var.double() + norm.eps)).numpy()
        shift = (shift - norm.running_mean.double().numpy()) * gain + norm.bias.detach().double().numpy()
    column = (12, *[1] * axes)
    unit = np.abs(gain) * scales.astype(np.float64) * scale_x
    exact = total * (np.sign(gain) * unit).reshape(column) + shift.reshape(column)
    got = layer(x, grid, norm).detach().double().numpy()
    # The bias is rounded to a multiple of the unit; the rest is exact in float32.
    assert bool((np.abs(got - exact) <= (0.5001 * unit).reshape(column) + 3e-7 * np.abs(exact) + 1e-6).all())
    rounded = layer.integers(grid, norm).bias_codes.detach().double().numpy()
    alive = unit > 0
    assert bool((rounded == np.round(rounded)).all())
    deployed = (total * np.sign(gain).reshape(column) + rounded.reshape(column)) * unit.reshape(column)
    np.testing.assert_allclose(got[:, alive], deployed[:, alive], rtol=5e-7, atol=1e-6)


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
    layer, raw = example(axes, transposed, {"kernel_size": 3, "padding": 1})
    layer.train(training)
    grid = grid_for(raw)
    x = grid(raw)
    torch.testing.assert_close(layer(x[1], grid), layer(x, grid)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_output_size_is_a_keyword(axes: int) -> None:
    layer, raw = example(axes, True, {"kernel_size": 3, "stride": 2})
    grid = grid_for(raw)
    x = grid(raw).detach()
    size = tuple(2 * n + 2 for n in SHAPES[axes])
    for mode in (layer.train(), layer.eval()):
        assert mode(x, grid, output_size=size).shape == (2, 12, *size)
        smaller = mode(x, grid)
        inner = tuple(slice(0, n) for n in smaller.shape[2:])
        assert torch.equal(mode(x, grid, output_size=torch.Size((2, 12, *size)))[(..., *inner)], smaller)
    plain = layer.float_type(8, 12, 3, stride=2)
    with torch.no_grad():
        plain.weight.copy_(layer.quantized(layer.weight))
        plain.bias.copy_(layer.bias)
    torch.testing.assert_close(layer.train()(x, output_size=size), plain(x, output_size=size), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("axes", "transposed"), [(1, False), (2, True), (3, True)])
def test_a_scale_per_group_of_inputs(axes: int, transposed: bool) -> None:
    """Groups are along the input axis of channels_first, so they never mix output channels."""
    spec = QuantSpec(bits=4, granularity="group", group_size=2, init="minmax")
    layer = twin(axes, transposed)(8, 6, 3, groups=2, activation_spec=None, weight_spec=spec)
    assert layer.weight_quantizer.scale.shape == (6, 2, *[1] * (axes + 1))
    x = torch.randn(1, 8, *SHAPES[axes])
    quantized = layer.quantized(layer.weight).detach()
    assert not torch.equal(quantized, layer.weight)
    torch.testing.assert_close(quantized, layer.weight, rtol=0, atol=layer.weight_quantizer.scale.max().item() * 0.501)
    assert layer.eval()(x).shape == layer.to_float()(x).shape
