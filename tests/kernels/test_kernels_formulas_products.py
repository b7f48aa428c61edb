"""Formulas of products against the C operators, exact integers, and float64 where the C operators cannot go."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from cases_formulas import Grid, dense, draw, draw_codes, grids, scale_factor, slopes, weight_of
from torch import Tensor

from qat.kernels.cpu import compiler
from qat.kernels.formulas import matmuls as f_matmuls
from qat.kernels.formulas import products as f_products
from qat.kernels.geometry import Geometry
from qat.kernels.operators import matmuls, products

needs_kernels = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
NEAREST = {4: torch.channels_last, 5: torch.channels_last_3d}
STEP, ZERO = 0.0123, 94.0
NUMBERS = torch.tensor([STEP, ZERO])
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.fixture(autouse=True)
def _tried() -> None:
    assert f_products.try_int_mm(torch.device("cpu"))


class Shape(NamedTuple):
    """Of an input and a weight, and the product's geometry."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: Geometry


SHAPES = {
    "linear": Shape((20, 24), (16, 24), Geometry([], [], [], 1)),
    "linear of sequences": Shape((3, 7, 10), (6, 10), Geometry([], [], [], 1)),
    "1-D": Shape((3, 8, 20), (6, 8, 3), Geometry([2], [1], [2], 1)),
    "1x1": Shape((2, 16, 5, 6), (24, 16, 1, 1), Geometry([1, 1], [0, 0], [1, 1], 1)),
    "dense": Shape((2, 8, 9, 11), (6, 8, 3, 2), Geometry([2, 1], [1, 0], [1, 2], 1)),
    "grouped": Shape((2, 8, 9, 11), (12, 2, 3, 3), Geometry([1, 1], [1, 1], [1, 1], 4)),
    "depthwise": Shape((2, 8, 9, 11), (8, 1, 5, 5), Geometry([2, 2], [2, 2], [1, 1], 8)),
    "3-D": Shape((2, 4, 5, 7, 6), (6, 4, 3, 1, 3), Geometry([1, 2, 1], [1, 0, 2], [1, 1, 1], 1)),
}


def arrange(x: Tensor, nearest: bool) -> Tensor:
    return x.to(memory_format=NEAREST[x.dim()]) if nearest and x.dim() in NEAREST else x


def values_of(weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The weight on its grid, in float64: its rounding decided in float32, as everywhere."""
    w, scales, smallest = (each.float() for each in weight)
    steps = torch.maximum(scales, smallest)
    return (w / steps).round().clamp(-127, 127).double() * steps.double()


def near(found: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
    assert found.shape == expected.shape
    assert bool(((found.double() - expected.double()).abs() <= allowed + 1e-30).all())


@needs_kernels
@pytest.mark.parametrize("nearest", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_products(name: str, per_row: bool, nearest: tuple[bool, bool]) -> None:
    shape, geometry = SHAPES[name], SHAPES[name].geometry
    codes = arrange(draw_codes(*shape.x), nearest[0])
    weight = weight_of(*shape.weight, per_row=per_row)
    weight = (arrange(weight[0], nearest[1]), *weight[1:])
    x, values = (codes.double() - ZERO) * STEP, values_of(weight)
    terms = geometry.multiply(x.abs(), values.abs(), None)
    for bias in (None, draw(shape.weight[0])):
        expected = geometry.multiply(x, values, None if bias is None else bias.double())
        given = (codes, NUMBERS, *weight, bias, -127, 127, *geometry)
        operators = products.codes_product(*given, False)
        for integers in (False, True):
            found = f_products.codes_product(*given, integers)
            near(found, expected, 3e-6 * terms)
            near(found, operators, 1e-5 * terms)
            assert found.dtype == torch.float32 and dense(found) == dense(operators)


def magnitudes(given: tuple[Any, ...], relative: bool) -> tuple[float, ...]:
    """Of the terms of every gradient, at most: with inputs as large as they can be, and a weight that nothing clips."""
    grad, codes, numbers, weight, scales, smallest, *rest = given
    extreme = (grad.abs(), torch.full_like(codes, 255), numbers, weight.abs())
    rest[-3:] = [True] * 3
    of_x, *_, of_bias = products.codes_product_backward(*extreme, scales, smallest, *rest)
    of_weight = products.codes_product_backward(*extreme, scales * 0 + 10, smallest, *rest)[1]
    steps = torch.maximum(scales, smallest)
    v = (weight / steps).clamp(-127, 127)
    of_steps = of_weight * torch.where(v.abs() == 127, v, v.round() - v).abs() * 0.1 * (steps**2 if relative else 1)
    of_scales = of_steps.flatten(1).sum(1) if scales.numel() > 1 else of_steps.sum()
    return tuple(float(each.max()) for each in (of_x, of_weight, of_scales, of_bias))


@needs_kernels
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("nearest", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name: str, nearest: tuple[bool, bool], needs: tuple[bool, bool, bool]) -> None:
    shape, geometry = SHAPES[name], SHAPES[name].geometry
    codes, relative = arrange(draw_codes(*shape.x), nearest[0]), nearest[0]
    for per_row in (True, False):
        weight = weight_of(*shape.weight, per_row=per_row)
        weight = (arrange(weight[0], nearest[1]), *weight[1:])
        out = geometry.multiply(codes.float(), weight[0], None)
        grad = draw(*out.shape, seed=5)
        given = (grad, codes, NUMBERS, *weight, -127, 127, 0.1, relative, *geometry, *needs)
        found = f_products.codes_product_backward(*given)
        expected = products.codes_product_backward(*given)
        for got, wanted, terms in zip(found, expected, magnitudes(given, relative), strict=True):
            near(got, wanted, 1e-5 * terms if wanted.numel() else 0.0)
            assert got.dtype == wanted.dtype and dense(got) == dense(wanted)
        if needs[1]:
            assert torch.equal(found[1] == 0, expected[1] == 0) and (not per_row or (found[1] == 0).any())
            assert not per_row or found[2].flatten()[0] <= 0


@needs_kernels
@pytest.mark.parametrize("grid", ["unsigned", "affine", "broken"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradient_of_an_inputs_scale(name: str, grid: str) -> None:
    shape, geometry = SHAPES[name], SHAPES[name].geometry
    x, weight, learned = draw(*shape.x), weight_of(*shape.weight), grids()[grid]
    grad = draw(*geometry.multiply(x, weight[0], None).shape, seed=5)
    given = (x, *learned, *weight, -127, 127, *geometry)
    terms = input_terms(grad, x, learned, values_of(weight), geometry)
    found = f_products.input_scale_gradient(grad, *given)
    near(found, products.input_scale_gradient(grad, *given), 1e-5 * terms)
    low = f_products.input_scale_gradient(grad.bfloat16(), *given)
    near(low, products.input_scale_gradient(grad.bfloat16().float(), *given), 2.0**-8 * terms)
    assert low.dtype == torch.float32 and (grid == "broken" or found != 0)


def input_terms(grad: Tensor, x: Tensor, grid: Grid, values: Tensor, geometry: Geometry) -> float:
    derivative = geometry.multiply(slopes(x, grid)[2].abs(), values.abs(), None)
    return float((grad.double().abs() * derivative).sum()) * scale_factor(grid)


@pytest.mark.parametrize("zero", [0.0, 3.0, 128.0, 255.0])
@pytest.mark.parametrize("kind", ["linear", "1x1", "1x1, channels_last"])
def test_integers_are_exact(kind: str, zero: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the extremes, too: 255 times 127, 1152 of them."""
    calls, original = [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *operands: calls.append(operands) or original(*operands))
    x, w = draw_codes(24, 1152), torch.randint(-127, 128, (16, 1152)).float()
    x[0], x[1], w[0], w[1] = 255, 0, 127, -127
    expected = (x.long() - int(zero)) @ w.long().T
    assert zero or expected[0, 0] == 255 * 127 * 1152
    scales, numbers = torch.full((16, 1), 0.5), torch.tensor([0.25, zero])
    geometry: Any = ([], [], [], 1)
    if kind != "linear":
        x, w, scales = x.view(2, 3, 4, 1152).permute(0, 3, 1, 2), w[..., None, None], scales[..., None, None]
        x = x if "last" in kind else x.contiguous()
        expected, geometry = expected.view(2, 3, 4, 16).permute(0, 3, 1, 2), ([1, 1], [0, 0], [1, 1], 1)
    given = (x, numbers, w * 0.5, scales, torch.full_like(scales, 0.1), None, -127, 127, *geometry, True)
    found = f_products.codes_product(*given)
    # Sums from 2^24 on are rounded to float32, once.
    assert torch.equal(found, expected.float() * 0.125) and expected.abs().max() > 2**24
    assert found.is_contiguous() is ("last" not in kind)
    ((left, right),) = calls
    assert left.dtype == right.dtype == torch.int8 and left.is_contiguous() and right.T.is_contiguous()


@pytest.mark.parametrize("name", SHAPES)
def test_where_integers_are_multiplied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *operands: calls.append(operands) or original(*operands))
    shape = SHAPES[name]
    given = (draw_codes(*shape.x), NUMBERS, *weight_of(*shape.weight), None, -127, 127)
    f_products.codes_product(*given, *shape.geometry, False)
    assert not calls
    f_products.codes_product(*given, *shape.geometry, True)
    assert bool(calls) is (name in ("linear", "1x1"))
    if name == "1x1":  # any other number, and it is no product of the matrices as they lie
        for other in (([2, 2], [0, 0], 1), ([1, 1], [1, 0], 1)):
            f_products.codes_product(*given, other[0], other[1], [1, 1], other[2], True)
        assert len(calls) == 1


def test_sizes_that_fit() -> None:
    sizes = [(17, 8, 8), (16, 8, 8), (17, 12, 8), (17, 8, 12), (17, 0, 8), (17, 8, 0), (17, 1 << 16, 8)]
    assert [f_products.fits_int_mm(*each) for each in sizes] == [True, False, False, False, False, False, True]
    assert not f_products.fits_int_mm(17, (1 << 16) + 8, 8) and 255 * 128 * (1 << 16) < 2**31


@pytest.mark.parametrize("integers", [False, True])
def test_nan_is_told(integers: bool) -> None:
    codes, (weight, scales, smallest) = draw_codes(20, 24), weight_of(16, 24)
    geometry = ([], [], [], 1)
    numbers = torch.tensor([math.nan, ZERO])
    y = f_products.codes_product(codes, numbers, weight, scales, smallest, None, -127, 127, *geometry, integers)
    assert y.isnan().all()
    weight[3, 5] = math.nan
    y = f_products.codes_product(codes, NUMBERS, weight, scales, smallest, None, -127, 127, *geometry, integers)
    assert y[:, 3].isnan().all() and y.isnan().sum() == 20


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("name", ["linear", "linear of sequences", "1x1", "dense", "grouped", "depthwise"])
def test_precisions(name: str, integers: bool, autocast: bool, dtype: torch.dtype) -> None:
    """Against float64, from weights that are rounded alike: two roundings of the result, float16's weights a third."""
    shape, geometry = SHAPES[name], SHAPES[name].geometry
    weight, bias = weight_of(*shape.weight), draw(shape.weight[0])
    given = weight if autocast else (weight[0].to(dtype), *weight[1:])
    codes, bias = draw_codes(*shape.x), bias if autocast else bias.to(dtype)
    arguments = (codes, NUMBERS, *given, bias, -127, 127, *geometry, integers)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast and dtype != torch.float32):
        found = f_products.codes_product(*arguments)
    x, values = (codes.double() - ZERO) * STEP, values_of(given)
    sums, terms = (geometry.multiply(*each, None) for each in ((x, values), (x.abs(), values.abs())))
    expected = sums + bias.double().view(-1, *[1] * len(geometry.stride))
    rounding = ROUNDING[dtype]
    weights = rounding * terms if dtype == torch.float16 else 0.0
    near(found, expected, rounding * (sums.abs() + expected.abs()) + 3e-6 * terms + weights)
    assert found.dtype == dtype


def test_float16_does_not_overflow() -> None:
    """Integers would: 255 * 127 * 64 is thirty times the largest number of float16."""
    codes, weight = torch.full((20, 64), 255, dtype=torch.uint8), torch.full((16, 64), 0.5).half()
    scales = torch.full((16, 1), 0.5 / 127)
    given = (weight, scales, scales / 8)
    numbers, geometry = torch.tensor([0.01, 0.0]), ([], [], [], 1)
    y = f_products.codes_product(codes, numbers, *given, None, -127, 127, *geometry, False)
    near(y, torch.full((20, 16), 0.5 * 2.55 * 64), 0.2)
    grad = torch.full((20, 16), 1000.0).half()  # what a loss scale makes of them
    rest = (-127, 127, 1.0, False, *geometry, True, True, True)
    found = f_products.codes_product_backward(grad, codes, numbers, *given, *rest)
    assert all(each.isfinite().all() for each in found)
    near(found[1], torch.full((16, 64), 2.55 * 20_000), 100.0)
    with torch.autocast("cpu", dtype=torch.float16):
        y = f_matmuls.codes_matmul(codes[None], codes.T.contiguous()[None], numbers, numbers)
    assert y.dtype == torch.float16 and y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_low_precision(name: str, dtype: torch.dtype) -> None:
    shape, geometry = SHAPES[name], SHAPES[name].geometry
    codes, weight = draw_codes(*shape.x), weight_of(*shape.weight)
    grad = draw(*geometry.multiply(codes.float(), weight[0], None).shape, seed=5).to(dtype)
    rest = (codes, NUMBERS, *weight, -127, 127, 0.1, False, *geometry, True, True, True)
    found = f_products.codes_product_backward(grad, *rest)
    expected = f_products.codes_product_backward(grad.double(), *rest)
    assert [each.dtype for each in found] == [dtype, *[torch.float32] * 3]
    for got, wanted in zip(found, expected, strict=True):
        near(got, wanted, 4 * ROUNDING[dtype] * float(wanted.abs().max()))
    near(found[3], expected[3], 1e-4)  # summed in float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = f_products.codes_product_backward(grad.float(), *rest)
    plain = f_products.codes_product_backward(grad.float(), *rest)
    assert all(torch.equal(got, wanted) for got, wanted in zip(same, plain, strict=True))


@needs_kernels
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(5, 7, 9), (2, 3, 33, 64)])
def test_matmuls(shape: tuple[int, ...], turned: tuple[bool, bool]) -> None:
    rest, rows, inner, columns = shape[:-2], shape[-2], shape[-1], 6
    a = draw_codes(*rest, inner, rows).mT if turned[0] else draw_codes(*rest, rows, inner)
    b = draw_codes(*rest, columns, inner, seed=1).mT if turned[1] else draw_codes(*rest, inner, columns, seed=1)
    given = (a, b, NUMBERS, torch.tensor([0.2, 0.0]))
    x, z = ((each.double() - float(number[1])) * float(number[0]) for each, number in zip(given[:2], given[2:]))  # noqa: B905
    found, expected = f_matmuls.codes_matmul(*given), matmuls.codes_matmul(*given)
    near(found, expected, 1e-5 * (x.abs() @ z.abs()))
    near(found, x @ z, 3e-6 * (x.abs() @ z.abs()))
    assert found.is_contiguous() and found.dtype == expected.dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = f_matmuls.codes_matmul(*given)
    assert low.dtype == torch.bfloat16
    near(low, x @ z, 2.0**-7 * (x @ z).abs() + 3e-6 * (x.abs() @ z.abs()))
    for grad in (draw(*rest, rows, columns), draw(*rest, columns, rows).mT):
        gradients = f_matmuls.codes_matmul_backward(grad, *given)
        operators = matmuls.codes_matmul_backward(grad, *given)
        terms = (grad.abs().double() @ z.abs().mT, x.abs().mT @ grad.abs().double())
        for got, wanted, term in zip(gradients, operators, terms, strict=True):
            near(got, wanted, 1e-5 * term)
            assert dense(got) == dense(wanted) and got.dtype == torch.float32
        low_gradients = f_matmuls.codes_matmul_backward(grad.bfloat16(), *given)
        for got, wanted, term in zip(low_gradients, gradients, terms, strict=True):
            near(got, wanted, 2.0**-6 * term)
            assert got.dtype == torch.bfloat16
    assert f_matmuls.codes_matmul(a, b, torch.tensor([math.nan, 0.0]), NUMBERS).isnan().all()
