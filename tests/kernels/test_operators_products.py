"""Operators of products, in C and by formula, against float64."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from qat.codes.operators.geometry import Geometry
from tests.references.cases_kernels import GRIDS, Quantized, dense, draw, draw_codes, near, ops, steps_of, weight_of

__all__ = ["ops"]  # a fixture

NEAREST = {4: torch.channels_last, 5: torch.channels_last_3d}
QPARAMS = torch.tensor([0.0123, 94.0])
STEP, ZERO = QPARAMS.double().tolist()
ROWS = Geometry([], [], [], 1)


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
    strides = dense(in_float.contiguous(memory_format=geometry.layout(codes, weight[0])))
    for bias in (None, draw(len(values))):
        expected = geometry.multiply(x, values, None if bias is None else bias.double())
        for batch_factor in (0, 1, 1000):
            found = ops.codes_product(codes, QPARAMS, *weight, bias, geometry.packed(), batch_factor)
            near(found, expected, 3e-6 * terms)
            assert found.dtype == torch.float32 and dense(found) == strides


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
    assert found != 0


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
    for grad in (draw(*rest, rows, columns), draw(*rest, columns, rows).mT):
        g = grad.double()
        exact, terms = (g @ z.mT, x.mT @ g), (g.abs() @ z.abs().mT, x.abs().mT @ g.abs())
        full = ops.codes_matmul_backward(grad, a, b, QPARAMS, other)
        for got, wanted, term, operand in zip(full, exact, terms, (a, b), strict=True):
            near(got, wanted, 1e-5 * term)
            assert dense(got) == dense(operand) and got.dtype == torch.float32
    assert ops.codes_matmul(a, b, torch.tensor([math.nan, 0.0]), other).isnan().all()
