"""Operators of products, in C and by formula, against float64; exact integers, and what 16 bits do to them."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qat.kernels.formulas import products as f_products
from qat.kernels.geometry import Geometry
from tests.references.cases_kernels import (
    FORMULA,
    GRIDS,
    Quantized,
    dense,
    draw,
    draw_codes,
    near,
    ops,
    steps_of,
    weight_of,
)

__all__ = ["ops"]  # a fixture

NEAREST = {4: torch.channels_last, 5: torch.channels_last_3d}
QPARAMS = torch.tensor([0.0123, 94.0])
STEP, ZERO = QPARAMS.double().tolist()
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
ROWS = Geometry([], [], [], 1)


@pytest.fixture(autouse=True)
def _tried() -> None:
    assert f_products.try_int_mm(torch.device("cpu"))


class Shape(NamedTuple):
    """Of an input and a weight, and the product's geometry."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    geometry: Geometry


SHAPES = {
    "linear": Shape((20, 24), (16, 24), ROWS),
    "linear of sequences": Shape((3, 7, 10), (6, 10), ROWS),
    "1-D": Shape((3, 8, 20), (6, 8, 3), Geometry([2], [1], [2], 1)),
    "1x1": Shape((2, 16, 5, 6), (24, 16, 1, 1), Geometry([1, 1], [0, 0], [1, 1], 1)),
    "1x1, strided": Shape((2, 16, 9, 11), (24, 16, 1, 1), Geometry([2, 2], [0, 0], [1, 1], 1)),
    "1x1, padded": Shape((2, 16, 5, 6), (24, 16, 1, 1), Geometry([1, 1], [1, 0], [1, 1], 1)),
    "1x1, grouped": Shape((2, 16, 5, 6), (24, 4, 1, 1), Geometry([1, 1], [0, 0], [1, 1], 4)),
    "dense": Shape((2, 8, 9, 11), (6, 8, 3, 2), Geometry([2, 1], [1, 0], [1, 2], 1)),
    "grouped": Shape((2, 8, 9, 11), (12, 2, 3, 3), Geometry([1, 1], [1, 1], [1, 1], 4)),
    "depthwise": Shape((2, 8, 9, 11), (8, 1, 5, 5), Geometry([2, 2], [2, 2], [1, 1], 8)),
    "3-D": Shape((2, 4, 5, 7, 6), (6, 4, 3, 1, 3), Geometry([1, 2, 1], [1, 0, 2], [1, 1, 1], 1)),
}
LAYOUTS = [(False, False), (True, False), (False, True)]
"""Whether channels are innermost in input and weight."""


def arrange(x: Tensor, nearest: bool) -> Tensor:
    return x.to(memory_format=NEAREST[x.dim()]) if nearest and x.dim() in NEAREST else x


def on_grid(weight: Any) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: the values of a weight, where its gradient passes, and the slope; rounding is decided in float32."""
    w, (scales, smallest, _), _ = weight
    steps = steps_of(scales, smallest)
    v = w.float() / steps
    inside = v.abs() <= 127
    slope = torch.where(inside, v.round() - v, v.clamp(-127, 127))
    return v.round().clamp(-127, 127).double() * steps.double(), inside, slope.double()


def case(name: str, nearest: tuple[bool, bool] = (False, False), **kind: bool) -> tuple[Tensor, Any, Geometry]:
    """Codes, a weight with its grid, and the geometry."""
    shape = SHAPES[name]
    weight, *rest = weight_of(*shape.weight, **kind)
    return arrange(draw_codes(*shape.x), nearest[0]), (arrange(weight, nearest[1]), *rest), shape.geometry


@pytest.mark.parametrize("nearest", LAYOUTS)
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_products(name: str, per_row: bool, nearest: tuple[bool, bool], ops: Any) -> None:
    codes, weight, geometry = case(name, nearest, per_row=per_row)
    x, values = (codes.double() - ZERO) * STEP, on_grid(weight)[0]
    terms = geometry.multiply(x.abs(), values.abs(), None)
    in_float = geometry.multiply((codes - ZERO) * STEP, weight[0], None)
    for bias in (None, draw(len(values))):
        expected = geometry.multiply(x, values, None if bias is None else bias.double())
        for batch_factor in (0, 1, 1000):
            found = ops.codes_product(codes, QPARAMS, *weight, bias, geometry.packed(), batch_factor)
            near(found, expected, 3e-6 * terms)
            assert found.dtype == torch.float32 and dense(found) == dense(in_float.contiguous(
                memory_format=geometry.layout(codes, weight[0])
            ))  # fmt: skip


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("nearest", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name: str, nearest: tuple[bool, bool], needs: tuple[bool, bool, bool], ops: Any) -> None:
    for per_row in (True, False):
        codes, weight, geometry = case(name, nearest, per_row=per_row, relative=nearest[0])
        values, inside, slope = on_grid(weight)
        x, scales = (codes.double() - ZERO) * STEP, weight[1][0]
        grad = arrange(draw(*geometry.multiply(x, values, None).shape, seed=5), nearest[0])
        inputs = [each.requires_grad_() for each in (x, values)]

        def back(grad: Tensor, x: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(geometry.multiply(x, values, None), (x, values), grad)  # noqa: B023

        of_x, of_values = back(grad.double(), *inputs)
        terms = back(grad.double().abs(), *(each.detach().abs().requires_grad_() for each in inputs))
        found = ops.codes_product_backward(grad, codes, QPARAMS, *weight, geometry.packed(), *needs)
        assert [each.numel() > 0 for each in found] == [needs[0], needs[1], needs[1], needs[2]]
        if needs[0]:
            near(found[0], of_x, 1e-5 * terms[0])
            assert dense(found[0]) == dense(codes)
        if needs[1]:
            near(found[1], torch.where(inside, of_values, 0.0), 1e-5 * terms[1])
            assert dense(found[1]) == dense(weight[0]) and (found[1][~inside] == 0).all()
            steps = steps_of(*weight[1][:2]).double()
            factor = 0.1 * (steps**2 if nearest[0] else 1.0)
            total = (of_values * slope).flatten(1).sum(1), (terms[1] * slope.abs()).flatten(1).sum(1)
            exact, size = (each.view(scales.shape) if per_row else each.sum().view(scales.shape) for each in total)
            exact = torch.where((scales < weight[1][1]) & (exact > 0), 0.0, exact * factor)
            near(found[2], exact, 1e-5 * size * factor)
        if needs[2]:
            axes = [0, *range(2, grad.dim())] if geometry.stride else list(range(grad.dim() - 1))
            near(found[3], grad.double().sum(axes), 1e-5 * grad.abs().sum(axes))


@pytest.mark.parametrize("grid", ["unsigned", "affine"])
@pytest.mark.parametrize("name", SHAPES)
def test_gradient_of_an_inputs_scale(name: str, grid: str, ops: Any) -> None:
    shape, weight = SHAPES[name], weight_of(*SHAPES[name].weight)
    x, values, geometry = draw(*shape.x), on_grid(weight)[0], shape.geometry
    on = Quantized(x, GRIDS[grid])
    derivative, size = (geometry.multiply(*each, None) for each in ((on.slope, values), (on.slope.abs(), values.abs())))
    grad = draw(*derivative.shape, seed=5)
    given = (x, *GRIDS[grid], *weight, geometry.packed())
    terms = float((grad.double().abs() * size).sum()) * on.factor
    found = ops.input_scale_gradient(grad, *given)
    near(found, (grad.double() * derivative).sum() * on.factor, 1e-5 * terms)
    low = FORMULA.input_scale_gradient(grad.bfloat16(), *given)
    near(low, found, 2.0**-7 * terms)
    assert low.dtype == torch.float32 and found != 0


@pytest.mark.parametrize("zero", [0.0, 3.0, 128.0, 255.0])
@pytest.mark.parametrize("kind", ["linear", "1x1", "1x1, channels_last"])
def test_integers_are_exact(kind: str, zero: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *operands: calls.append(operands) or original(*operands))
    x, w = draw_codes(24, 1152), torch.randint(-127, 128, (16, 1152)).float()
    x[0], x[1], w[0], w[1] = 255, 0, 127, -127
    expected = (x.long() - int(zero)) @ w.long().T
    assert zero or expected[0, 0] == 255 * 127 * 1152
    scales, qparams, geometry = torch.full((16, 1), 0.5), torch.tensor([0.25, zero]), ROWS
    if kind != "linear":
        x, w, scales = x.view(2, 3, 4, 1152).permute(0, 3, 1, 2), w[..., None, None], scales[..., None, None]
        x, geometry = x if "last" in kind else x.contiguous(), SHAPES["1x1"].geometry
        expected = expected.view(2, 3, 4, 16).permute(0, 3, 1, 2)
    grid = [scales, torch.full_like(scales, 0.1), None]
    found = FORMULA.codes_product(x, qparams, w * 0.5, grid, [-127.0, 127.0, 0, 1, 0], None, geometry.packed(), 1)
    # Sums from 2^24 on are rounded to float32, once.
    assert torch.equal(found, expected.float() * 0.125) and expected.abs().max() > 2**24
    assert found.is_contiguous() is ("last" not in kind)
    ((left, right),) = calls
    assert left.dtype == right.dtype == torch.int8 and left.is_contiguous() and right.T.is_contiguous()


@pytest.mark.parametrize("name", SHAPES)
def test_where_formulas_multiply_integers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *operands: calls.append(operands) or original(*operands))
    codes, weight, geometry = case(name)
    for batch_factor in (0, 1):
        FORMULA.codes_product(codes, QPARAMS, *weight, None, geometry.packed(), batch_factor)
    assert len(calls) == (name in ("linear", "1x1"))


def test_sizes_that_fit() -> None:
    sizes = [(17, 8, 8), (16, 8, 8), (17, 12, 8), (17, 8, 12), (17, 0, 8), (17, 8, 0), (17, 1 << 16, 8)]
    assert [f_products.fits_int_mm(*each) for each in sizes] == [True, False, False, False, False, False, True]
    assert not f_products.fits_int_mm(17, (1 << 16) + 8, 8) and 255 * 128 * (1 << 16) < 2**31


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("batch_factor", [0, 1000])
@pytest.mark.parametrize("name", ["linear", "dense", "depthwise"])
def test_nan_is_found_and_infinity_is_the_largest(name: str, batch_factor: int, per_row: bool, ops: Any) -> None:
    codes, (weight, *grid), geometry = case(name, per_row=per_row)
    rest = (*grid, None, geometry.packed(), batch_factor)
    assert ops.codes_product(codes, torch.tensor([math.nan, ZERO]), weight, *rest).isnan().all()
    centre = (0, *[size // 2 for size in weight.shape[2:]])  # elsewhere it may meet nothing but padding
    weight[(4, *centre)] = math.inf
    x, values = (codes.double() - ZERO) * STEP, on_grid((weight, *grid))[0]
    found = ops.codes_product(codes, QPARAMS, weight, *rest)
    near(found, geometry.multiply(x, values, None), 3e-6 * geometry.multiply(x.abs(), values.abs(), None))
    weight[(5, *centre)] = math.nan
    y = ops.codes_product(codes, QPARAMS, weight, *rest).movedim(1 if geometry.stride else -1, 0)
    assert y[5].isnan().all() and y.isnan().sum() == y[5].numel()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("batch_factor", [0, 1])
@pytest.mark.parametrize("name", ["linear", "1x1", "dense", "depthwise"])
def test_precisions(name: str, batch_factor: int, autocast: bool, dtype: torch.dtype) -> None:
    """Against float64, from weights that are rounded alike: two roundings of the result, float16's weights a third."""
    codes, (weight, *grid), geometry = case(name)
    bias, weight = (each if autocast else each.to(dtype) for each in (draw(len(weight)), weight))
    with torch.autocast("cpu", dtype=dtype, enabled=autocast and dtype != torch.float32):
        found = FORMULA.codes_product(codes, QPARAMS, weight, *grid, bias, geometry.packed(), batch_factor)
    x, values = (codes.double() - ZERO) * STEP, on_grid((weight, *grid))[0]
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
    given = (weight, [scales, scales / 8, None], [-127.0, 127.0, 0.0, 1.0, 0.0])
    qparams = torch.tensor([0.01, 0.0])
    y = FORMULA.codes_product(codes, qparams, *given, None, ROWS.packed(), 0)
    near(y, torch.full((20, 16), 0.5 * 2.55 * 64), 0.2)
    grad = torch.full((20, 16), 1000.0).half()  # what a loss scale makes of them
    found = FORMULA.codes_product_backward(grad, codes, qparams, *given, ROWS.packed(), True, True, True)
    assert all(each.isfinite().all() for each in found)
    near(found[1], torch.full((16, 64), 2.55 * 20_000), 100.0)
    with torch.autocast("cpu", dtype=torch.float16):
        y = FORMULA.codes_matmul(codes[None], codes.T.contiguous()[None], qparams, qparams)
    assert y.dtype == torch.float16 and y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_low_precision(name: str, dtype: torch.dtype) -> None:
    codes, weight, geometry = case(name)
    grad = draw(*geometry.multiply(codes.float(), weight[0], None).shape, seed=5).to(dtype)
    rest = (codes, QPARAMS, *weight, geometry.packed(), True, True, True)
    found, expected = (FORMULA.codes_product_backward(each, *rest) for each in (grad, grad.double()))
    assert [each.dtype for each in found] == [dtype, *[torch.float32] * 3]
    for got, wanted in zip(found, expected, strict=True):
        near(got, wanted, 4 * ROUNDING[dtype] * float(wanted.abs().max()))
    near(found[3], expected[3], 1e-4)  # summed in float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = FORMULA.codes_product_backward(grad.float(), *rest)
    plain = FORMULA.codes_product_backward(grad.float(), *rest)
    assert all(torch.equal(got, wanted) for got, wanted in zip(same, plain, strict=True))


@pytest.mark.parametrize("turned", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 7, 9), (2, 3, 33, 64)])
def test_matmuls(shape: tuple[int, ...], turned: tuple[bool, bool], ops: Any) -> None:
    rest, rows, inner, columns = shape[:-2], shape[-2], shape[-1], 6
    a = draw_codes(*rest, inner, rows).mT if turned[0] else draw_codes(*rest, rows, inner)
    b = draw_codes(*rest, columns, inner, seed=1).mT if turned[1] else draw_codes(*rest, inner, columns, seed=1)
    other = torch.tensor([0.2, 0.0])
    x, z = ((each.double() - float(pair[1])) * float(pair[0]) for each, pair in ((a, QPARAMS), (b, other)))
    found = ops.codes_matmul(a, b, QPARAMS, other)
    near(found, x @ z, 3e-6 * (x.abs() @ z.abs()))
    assert found.is_contiguous() and found.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = FORMULA.codes_matmul(a, b, QPARAMS, other)
    assert low.dtype == torch.bfloat16
    near(low, x @ z, 2.0**-7 * (x @ z).abs() + 3e-6 * (x.abs() @ z.abs()))
    for grad in (draw(*rest, rows, columns), draw(*rest, columns, rows).mT):
        g = grad.double()
        exact, terms = (g @ z.mT, x.mT @ g), (g.abs() @ z.abs().mT, x.abs().mT @ g.abs())
        full = ops.codes_matmul_backward(grad, a, b, QPARAMS, other)
        rounded = FORMULA.codes_matmul_backward(grad.bfloat16(), a, b, QPARAMS, other)
        for got, low, wanted, term, operand in zip(full, rounded, exact, terms, (a, b), strict=True):
            near(got, wanted, 1e-5 * term)
            near(low, wanted, 2.0**-6 * term)
            assert dense(got) == dense(operand) and (got.dtype, low.dtype) == (torch.float32, torch.bfloat16)
    assert ops.codes_matmul(a, b, torch.tensor([math.nan, 0.0]), other).isnan().all()
