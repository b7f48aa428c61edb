"""Formulas of quantizers, norms, curves and pools against the C kernels; of bfloat16 inputs against float64."""

import math
from typing import Any

import pytest
import torch
from cases_formulas import LAYOUTS, Grid, draw, draw_codes, grids, scale_factor, slopes
from torch import Tensor

from qat.kernels.cpu import compiler
from qat.kernels.cpu import quantizers as cpu_quantizers
from qat.kernels.formulas import curves as f_curves
from qat.kernels.formulas import norms as f_norms
from qat.kernels.formulas import pools as f_pools
from qat.kernels.formulas import quantizers as f_quantizers
from qat.kernels.operators import curves, norms, pools, quantizers

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
GRIDS = grids()
BOUNDS = [(-math.inf, math.inf), (0.0, math.inf), (-0.5, 1.0)]
LOW_PRECISION = [torch.bfloat16, torch.float16]


def same(found: Tensor, expected: Tensor) -> None:
    """Everything, NaN included."""
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(found.nan_to_num(123.0), expected.nan_to_num(123.0))


def same_codes(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], share: float = 0.0) -> Tensor:
    """Codes and numbers; returns where codes differ by one, which they may at this share of places."""
    same(found[-1], expected[-1])
    codes, wanted = found[-2], expected[-2]
    assert (codes.dtype, codes.stride()) == (wanted.dtype, wanted.stride())
    apart = (codes.int() - wanted.int()).abs()
    assert apart.max() <= 1 and (apart > 0).sum() <= math.ceil(share * codes.numel())
    return apart > 0


def near(found: Tensor, expected: Tensor, magnitude: Tensor | float, tolerance: float = 1e-5) -> None:
    """Sums, whose terms have this magnitude altogether."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert bool(((found.double() - expected.double()).abs() <= tolerance * magnitude + 1e-30).all())


def magnitude(grad: Tensor, values: Tensor, grid: Grid) -> float:
    """Of the terms of the scale's gradient."""
    return float((grad.double() * slopes(values, grid)[2]).abs().sum()) * scale_factor(grid)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GRIDS)
def test_a_tensor(name: str, layout: str) -> None:
    grid, x, grad = GRIDS[name], LAYOUTS[layout](draw(6, 8, 9, 11)), LAYOUTS[layout](draw(6, 8, 9, 11, seed=1))
    same_codes(f_quantizers.quantize_codes(x, *grid), quantizers.quantize_codes(x, *grid))
    for needs, given in ((True, grad), (False, grad), (True, grad.contiguous()), (True, grad[:1].expand_as(grad))):
        found = f_quantizers.quantize_codes_backward(given, x, *grid, needs)
        expected = quantizers.quantize_codes_backward(given, x, *grid, needs)
        same(found[0], expected[0])
        near(found[1], expected[1], magnitude(given, x, grid))


@pytest.mark.parametrize("name", GRIDS)
def test_ties_bounds_nan_and_infinity(name: str) -> None:
    grid = GRIDS[name]
    step = grid[0].clamp(float(grid[1]), 1e12)
    x = torch.cat([step * (torch.arange(-600, 600) / 2), torch.tensor([math.inf, -math.inf, 3e38, -3e38])])
    same_codes(f_quantizers.quantize_codes(x, *grid), quantizers.quantize_codes(x, *grid))
    x[700] = math.nan
    found, expected = f_quantizers.quantize_codes(x, *grid), quantizers.quantize_codes(x, *grid)
    kept = torch.arange(len(x)) != 700
    same_codes((found[0][kept], found[1]), (expected[0][kept], expected[1]))
    assert found[1].isnan().tolist() == [True, False]
    for got, wanted in zip(
        f_quantizers.quantize_codes_backward(torch.ones_like(x), x, *grid, True),
        quantizers.quantize_codes_backward(torch.ones_like(x), x, *grid, True),
        strict=True,
    ):
        same(got, wanted)
    assert got.isnan()


def test_a_broken_scale_is_not_lowered_further() -> None:
    """And a gradient that raises it is kept."""
    x = draw(1000)
    for sign in (1.0, -1.0):
        grad = sign * slopes(x, GRIDS["broken"])[2].float()
        found = f_quantizers.quantize_codes_backward(grad, x, *GRIDS["broken"], False)[1]
        expected = quantizers.quantize_codes_backward(grad, x, *GRIDS["broken"], False)[1]
        assert found == expected == 0 if sign > 0 else found < 0 and expected < 0


def test_scales_with_axes() -> None:
    grid = tuple(each.reshape(1) if isinstance(each, Tensor) else each for each in GRIDS["affine"])
    x = torch.tensor(0.7)
    assert f_quantizers.quantize_codes(x, *grid)[0].shape == ()  # type: ignore[arg-type]
    assert f_quantizers.quantize_codes_backward(x, x, *grid, True)[1].shape == (1,)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [(0.0123, 0.0057), (0.5, 0.25)])  # with the latter, sums lie on the bounds
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sum(layout: str, bounds: tuple[float, float], steps: tuple[float, float]) -> None:
    a, b, grad = (LAYOUTS[layout](each) for each in (draw_codes(6, 8, 9, 11), draw_codes(6, 8, 9, 11, seed=1),
                                                     draw(6, 8, 9, 11)))  # fmt: skip
    numbers = torch.tensor([steps[0], 128.0]), torch.tensor([steps[1], 17.0])
    for grid in GRIDS.values():
        given = (a, b, *numbers, *bounds, *grid)
        same_codes(f_quantizers.add_quantize(*given), quantizers.add_quantize(*given))
        found = f_quantizers.add_quantize_backward(grad, *given)
        expected = quantizers.add_quantize_backward(grad, *given)
        same(found[0], expected[0])
        z = cpu_quantizers.dequantize(a, numbers[0]) + cpu_quantizers.dequantize(b, numbers[1])
        near(found[1], expected[1], magnitude(grad, z.clamp(*bounds), grid))
    same(f_quantizers.dequantize(a, numbers[0]), cpu_quantizers.dequantize(a, numbers[0]))
    spoilt = torch.tensor([math.nan, 17.0])
    assert f_quantizers.add_quantize(a, b, numbers[0], spoilt, *bounds, *grid)[1][0].isnan()


VOLUMES = {
    "rows": lambda: draw(700, 12),
    "sequences": lambda: draw(9, 80, 12),
    "images": lambda: draw(6, 12, 11, 13),
    "channels_last": lambda: draw(6, 12, 11, 13).to(memory_format=torch.channels_last),
    "volumes": lambda: draw(3, 12, 5, 7, 9),
    "volumes, channels last": lambda: draw(3, 12, 5, 7, 9).to(memory_format=torch.channels_last_3d),
}


def channels_of(y: Tensor) -> int:
    return y.shape[1] if y.dim() > 3 else y.shape[-1]


@pytest.mark.parametrize("kind", VOLUMES)
def test_statistics(kind: str) -> None:
    y = VOLUMES[kind]() * 3 + 100
    for found, expected in zip(f_norms.batch_statistics(y, 1e-5), norms.batch_statistics(y, 1e-5), strict=True):
        assert found.dtype == torch.float32 and torch.allclose(found, expected, rtol=2e-6)


def test_statistics_of_one_value() -> None:
    y = draw(1, 12)
    found = f_norms.batch_statistics(y, 0.25)
    for got, expected in zip(found, norms.batch_statistics(y, 0.25), strict=True):
        same(got, expected)
    assert found[1].eq(2).all() and found[2].eq(0).all()


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("kind", VOLUMES)
def test_a_norm(kind: str, bounds: tuple[float, float]) -> None:
    """C rounds y * alpha + offset once: one code in 2000 may differ, and gradients where codes do."""
    y = VOLUMES[kind]() * 3
    n, grad = channels_of(y), draw(*y.shape, seed=4)
    mean, inverse, _ = norms.batch_statistics(y, 1e-5)
    norm = (1 + 0.1 * draw(n, seed=1), 0.3 * draw(n, seed=2), mean, inverse)
    for name, grid in GRIDS.items():
        given = (y, *norm, *bounds, *grid)
        apart = same_codes(f_norms.norm_quantize(*given), norms.norm_quantize(*given), 5e-4)
        assert name != "huge" or not apart.any()
        for follows, needs in ((True, True), (False, True), (True, False)):
            found = f_norms.norm_quantize_backward(grad, *given, follows, needs)
            expected = norms.norm_quantize_backward(grad, *given, follows, needs)
            assert (found[0].shape, found[0].stride()) == (expected[0].shape, expected[0].stride())
            close = torch.isclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
            assert (~close).float().mean() <= 5e-4 if needs else found[0].numel() == 0
            ties = 1e5 * float((grad.abs() * apart).sum())
            across = [0, *range(2, y.dim())] if y.dim() > 3 else [*range(y.dim() - 1)]
            sizes = grad.abs().double().sum(across)
            near(found[1], expected[1], sizes * 3 + 3 * ties)
            near(found[2], expected[2], sizes + ties)
            z = y.double().movedim(1 if y.dim() > 3 else -1, -1).sub(mean).mul(inverse * norm[0]).add(norm[1])
            z = z.movedim(-1, 1) if y.dim() > 3 else z
            terms = magnitude(grad, z.clamp(*bounds), grid)
            near(found[3], expected[3], terms + ties * scale_factor(grid))
    spoilt = y.clone()
    spoilt[0, 0] = math.nan
    assert f_norms.norm_quantize(spoilt, *norm, *bounds, *grid)[1].isnan().tolist() == [True, False]


@pytest.mark.parametrize("curve", curves.CURVE_NUMBERS)
@pytest.mark.parametrize("name", GRIDS)
def test_curves(name: str, curve: str) -> None:
    grid, x, grad = GRIDS[name], draw(40, 301) * 3, draw(40, 301, seed=1)
    expected = curves.curve_quantize(x, curve, *grid)
    apart = same_codes(f_curves.curve_quantize(x, curve, *grid), expected, 0 if curve == "hardswish" else 2e-4)
    found_x, found_scale = f_curves.curve_quantize_backward(grad, x, curve, *grid)
    expected_x, expected_scale = curves.curve_quantize_backward(grad, x, curve, *grid)
    assert (~torch.isclose(found_x, expected_x, rtol=1e-5, atol=2e-6)).float().mean() <= 2e-4
    terms = magnitude(grad, f_curves.CURVES[curve](x.double())[0], grid)
    ties = scale_factor(grid) * float((grad.abs() * apart).sum())
    near(found_scale, expected_scale, terms + 1e5 * ties)
    far = torch.tensor([-3e38, -1e4, -100.0, -13.0, 0.0, 100.0, 1e4, 3e38, math.nan])
    found, expected = (each.curve_quantize(far, curve, *grid) for each in (f_curves, curves))
    same_codes((found[0][:-1], found[1]), (expected[0][:-1], expected[1]))
    found, expected = (each.curve_quantize_backward(far * 0 + 1, far, curve, *grid) for each in (f_curves, curves))
    assert torch.allclose(found[0], expected[0], rtol=1e-5, atol=1e-7) and found[1].isnan() and expected[1].isnan()


@pytest.mark.parametrize("multiplier", [1.0, 0.125, -2.0])
def test_softmax(multiplier: float) -> None:
    x, grad = draw(4, 30, 197) * 3, draw(4, 197, 30, seed=1).mT
    x[0, 0, 5:], x[1, 1] = -math.inf if multiplier > 0 else math.inf, 0.0
    for grid in (GRIDS["unsigned"], (torch.tensor(0.5 / 255), torch.tensor(1e-6), None, 0, 255, 0, 0.5, True)):
        found = f_curves.softmax_quantize(x, multiplier, *grid)
        expected = curves.softmax_quantize(x, multiplier, *grid)
        assert torch.allclose(found[0], expected[0], rtol=2e-6, atol=1e-12)
        same_codes(found, expected, 2e-4)
        p = expected[0]
        found = f_curves.softmax_quantize_backward(grad, p, multiplier, *grid)
        expected = curves.softmax_quantize_backward(grad, p, multiplier, *grid)
        assert found[0].stride() == expected[0].stride()
        assert torch.allclose(found[0], expected[0], rtol=1e-4, atol=1e-6)
        near(found[1], expected[1], magnitude(grad, p, grid))
    x[2, 3] = -math.inf if multiplier > 0 else math.inf
    assert f_curves.softmax_quantize(x, multiplier, *grid)[2].isnan().tolist() == [True, False]


WINDOWS: dict[str, tuple[Any, ...]] = {
    "2x2": ([2, 2], [2, 2], [0, 0], [1, 1], False),
    "3x3": ([3, 3], [2, 2], [1, 1], [1, 1], False),
    "3x2, rounded up": ([3, 2], [2, 3], [1, 0], [1, 1], True),
    "none behind": ([3, 3], [3, 3], [1, 1], [1, 1], True),
    "apart": ([2, 3], [1, 2], [1, 1], [2, 1], False),
    "gaps": ([1, 2], [3, 4], [0, 0], [1, 1], True),
    "one": ([1, 1], [1, 1], [0, 0], [1, 1], False),
    "whole": ([11, 13], [1, 1], [0, 0], [1, 1], False),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", WINDOWS)
def test_pools(name: str, layout: torch.memory_format) -> None:
    """Few levels, so that there are ties; 0 in the corners, where there is padding."""
    codes = (draw_codes(3, 5, 11, 13) % 4).to(memory_format=layout)
    codes[0, :, :3, :3], codes[1, :, -4:, -4:] = 0, 255
    window = WINDOWS[name]
    found, expected = f_pools.max_pool_codes(codes, *window), pools.max_pool_codes(codes, *window)
    for got, wanted in zip(found, expected, strict=True):
        same(got, wanted)
    for grad in (draw(*found[0].shape).to(memory_format=layout), draw(*found[0].shape), torch.ones(found[0].shape)):
        given = (grad, found[1], 11, 13, *window[:4])
        same(f_pools.max_pool_codes_backward(*given), pools.max_pool_codes_backward(*given))


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("name", ["signed", "affine", "two bits"])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """Values and gradients of 16 bits are the same numbers in float32: codes as of these, gradients rounded once."""
    grid, y, grad = GRIDS[name], draw(6, 8, 9, 11).to(dtype), draw(6, 8, 9, 11, seed=1).to(dtype)
    wide, full = y.float(), grad.float()
    _, inside, slope = slopes((wide / grid[0]).double() * float(grid[0]), grid)
    zero = 0.0 if grid[2] is None else float(grid[2])
    expected = ((wide / grid[0]).double().round() + zero).clamp(grid[3], grid[4]) + grid[5]
    codes, numbers = f_quantizers.quantize_codes(y, *grid)
    assert torch.equal(codes.double(), expected) and numbers.dtype == torch.float32
    grad_x, grad_scale = f_quantizers.quantize_codes_backward(grad, y, *grid, True)
    assert torch.equal(grad_x, torch.where(inside, grad, 0)) and grad_scale.dtype == torch.float32
    total = (full.double() * slope).sum() * scale_factor(grid)
    near(grad_scale.double(), total, magnitude(full, wide, grid))
    norm = (1 + 0.1 * draw(8), draw(8, seed=2), *f_norms.batch_statistics(y, 1e-5)[:2])
    assert {each.dtype for each in norm} == {torch.float32}
    for given, widened in (
        (f_norms.norm_quantize_backward(grad, y, *norm, -1.0, 1.0, *grid, True, True),
         f_norms.norm_quantize_backward(full, wide, *norm, -1.0, 1.0, *grid, True, True)),
        (f_curves.curve_quantize_backward(grad, y, "silu", *grid),
         f_curves.curve_quantize_backward(full, wide, "silu", *grid)),
        (f_curves.softmax_quantize_backward(grad, y.softmax(-1), 2.0, *grid),
         f_curves.softmax_quantize_backward(full, y.softmax(-1).float(), 2.0, *grid)),
    ):  # fmt: skip
        assert given[0].dtype == dtype and torch.equal(given[0], widened[0].to(dtype))
        assert all(torch.equal(got, wanted) for got, wanted in zip(given[1:], widened[1:], strict=True))
    for found, wanted in (
        (f_norms.norm_quantize(y, *norm, 0.0, 6.0, *grid), f_norms.norm_quantize(wide, *norm, 0.0, 6.0, *grid)),
        (f_curves.curve_quantize(y, "gelu", *grid), f_curves.curve_quantize(wide, "gelu", *grid)),
        (f_curves.softmax_quantize(y, 2.0, *grid)[1:], f_curves.softmax_quantize(wide, 2.0, *grid)[1:]),
    ):
        same_codes(found, wanted)
    assert f_curves.softmax_quantize(y, 2.0, *grid)[0].dtype == dtype


def test_16_bit_norms_against_float64() -> None:
    y, grid = (draw(30, 16, 7, 7) * 2 + 1).bfloat16(), GRIDS["signed"]
    wide = y.double()
    mean, inverse, variance = f_norms.batch_statistics(y, 1e-5)
    assert torch.allclose(mean.double(), wide.mean((0, 2, 3)), rtol=1e-5)
    assert torch.allclose(variance.double(), wide.var((0, 2, 3)), rtol=1e-5)
    ones = torch.ones(16)
    codes = f_norms.norm_quantize(y, ones, ones * 0, mean, inverse, 0.0, math.inf, *grid)[0]
    z = ((wide - mean.view(-1, 1, 1)) * inverse.view(-1, 1, 1)).clamp(min=0) / float(grid[0])
    apart = (codes.double() - 128 - z.round().clamp(-128, 127)).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-3
