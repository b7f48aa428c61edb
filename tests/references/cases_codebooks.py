"""Rows of the proof matrix for the estimators whose levels are not an integer grid: APoT, N2UQ, low-precision floats,
MX blocks, DoReFa's activations; CASES holds the weight rules of cases_weights.py as well.

The surrogates are written from the published formulas with detach; the references are in reference_codebooks.py.
Input points are multiples of small powers of two, so that bounds and ties stay bounds and ties in every dtype.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.functional.codebooks.apot import apot_quantize
from qat.functional.codebooks.floats import float_quantize, mx_quantize
from qat.functional.codebooks.n2uq import n2uq_quantize
from qat.functional.dorefa import dorefa_quantize_activation
from tests.references import cases_weights
from tests.references import reference_codebooks as reference
from tests.references.estimator_case import Case
from tests.references.surrogates import clip, straight_through, tensor


def dorefa_activation_case(bits: int) -> Case:
    n, rule = 2**bits - 1, reference.dorefa_activation(bits)
    points = [-20.0, -0.25, -0.0, 0.0, 0.125, 0.28125, 0.5, 0.71875, 0.9375, 1.0, 1.0078125, 1.5, 20.0]  # 0.5: a tie
    return Case(
        name=f"dorefa_quantize_activation, {bits} bits",
        function=partial(dorefa_quantize_activation, bits=bits),
        inputs=(tensor(points),),
        surrogate=lambda x: straight_through(torch.round(clip(x, 0.0, 1.0) * n) / n, clip(x, 0.0, 1.0)),
        reference=rule.forward,
        reference_gradient=rule.backward,
        levels=2**bits,
    )


# APoT


def rounded_between(x: Tensor, scale: Tensor, v: Tensor, bounded: Tensor, level: Tensor) -> Tensor:
    """scale * level with LSQ's gradient: within the bounds x plus a constant residual times the scale."""
    return torch.where(v == bounded, x + scale * (level - v), scale * level)


def apot_surrogate(x: Tensor, alpha: Tensor, bits: int, signed: bool) -> Tensor:
    exact = reference.apot_levels(bits - 1 if signed else bits)
    levels, middles = tensor([float(level) for level in exact]), [float(sum(pair) / 2) for pair in pairwise(exact)]
    v = (x / alpha).detach()
    bounded = clip(v, -1.0 if signed else 0.0, 1.0)
    nearest = torch.sign(bounded) * levels[torch.bucketize(bounded.abs(), tensor(middles))]  # a tie stays below
    return rounded_between(x, alpha, v, bounded, nearest)


def apot_case(bits: int, signed: bool) -> Case:
    """The points include every tie of the grid; alpha is chosen so that alpha * (sum of two levels) / 2 is exact."""
    levels, rule = reference.apot_levels(bits - 1 if signed else bits), reference.apot(bits, signed)
    alpha = float({2: 2.0, 3: 1.25, 4: 1.5}[bits - 1 if signed else bits])
    ties = [float((low + high) / 2 * reference.Fraction(alpha)) for low, high in pairwise(levels)]
    points = [0.0, 0.34375, 0.71875, 0.9375, 1.0625, alpha / 2, alpha, alpha + 0.0625, 1.5 * alpha, 20.0, *ties]
    points = points[: len(points) // 2 * 2]
    x = tensor([points, [-point for point in points]]).reshape(2, -1, 2)
    return Case(
        name=f"apot_quantize, {'signed' if signed else 'unsigned'} {bits} bits",
        function=partial(apot_quantize, bits=bits, signed=signed),
        inputs=(x, tensor(alpha)),
        surrogate=partial(apot_surrogate, bits=bits, signed=signed),
        reference=rule.forward,
        reference_gradient=rule.backward,
        broadcast=(1,),
        levels=2**bits - 1 if signed else 2**bits,
    )


# N2UQ


def n2uq_surrogate(x: Tensor, start: Tensor, widths: Tensor, step: Tensor, qmin: int) -> Tensor:
    """The level, with the gradient of the line through the points (knot k, level k)."""
    knots = start + torch.cat([widths.new_zeros(1), widths.cumsum(0)])
    within = clip(x, knots[0], knots[-1])
    segment = (within.detach().unsqueeze(-1) > knots[1:-1].detach()).sum(-1)
    line = segment + (within - knots[segment]) / widths[segment]
    line = torch.where((x < knots[0]) | (x > knots[-1]), line.detach(), line)
    level = (x.unsqueeze(-1) > knots[:-1] + widths / 2).sum(-1)
    return step * (qmin + straight_through(level.to(line.dtype), line))


def n2uq_case(qmin: int) -> Case:
    """Knots -0.75, 0.25, 0.75, 1.25, 3.25, thresholds -0.25, 0.5, 1, 2.25; on an inner knot the left slope counts."""
    points = [-20.0, -1.0, -0.75, -0.5, -0.3125, -0.25, -0.1875, 0.0, 0.25, 0.4375, 0.5, 0.75, 0.875, 1.0, 1.0625]
    points += [1.25, 2.25, 3.25, 3.375, 20.0]
    return Case(
        name=f"n2uq_quantize, qmin {qmin}",
        function=partial(n2uq_quantize, qmin=qmin),
        inputs=(tensor(points).reshape(4, 5), tensor(-0.75), tensor([1.0, 0.5, 0.5, 2.0]), tensor(0.3)),
        surrogate=partial(n2uq_surrogate, qmin=qmin),
        reference=partial(reference.n2uq, qmin=qmin),
        reference_gradient=lambda grad, *inputs: reference.n2uq_gradients(*inputs, grad, qmin),
        levels=5,
        excused={
            "idempotent": "input thresholds and output levels are independent of each other",
            "zero": "the learned thresholds decide which level 0 falls to",
        },
    )


# Floats


def float_points(name: str) -> list[float]:
    """Around zero, around the smallest normal number, around the largest: the numbers and the ties between them."""
    levels = reference.float_levels(name)
    normal = 2 ** reference.FORMATS[name][1]
    chosen = sorted({0, 1, 2, normal - 1, normal, normal + 1, len(levels) - 3, len(levels) - 2, len(levels) - 1})
    ties = [(levels[k] + levels[k + 1]) / 2 for k in chosen[:-1]]
    between = [0.75 * levels[1], 1.25 * levels[normal]]
    points = [*levels[chosen], *ties, *between, 1.03125 * levels[-1], 1.0625 * levels[-1], 4 * levels[-1]]
    return [float(point) for point in points[: len(points) // 2 * 2]]


def float_surrogate(x: Tensor, scale: Tensor, name: str) -> Tensor:
    levels = tensor(reference.float_levels(name))
    v = (x / scale).detach()
    bounded = clip(v, -float(levels[-1]), float(levels[-1]))
    middles = (levels[1:] + levels[:-1]) / 2
    below, above = (torch.bucketize(bounded.abs(), middles, right=right) for right in (False, True))
    cast = torch.sign(bounded) * levels[torch.where(below % 2 == 0, below, above)]  # of a tie the even code
    return rounded_between(x, scale, v, bounded, cast)


def float_case(name: str) -> Case:
    points, rule = float_points(name), reference.float_quantize(name)
    return Case(
        name=f"float_quantize, {name}",
        function=partial(float_quantize, format=name),
        inputs=(0.25 * tensor([points, [-point for point in points]]).reshape(2, -1, 2), tensor(0.25)),
        surrogate=partial(float_surrogate, name=name),
        reference=rule.forward,
        reference_gradient=rule.backward,
        broadcast=(1,),
        levels=2 * len(reference.float_levels(name)) - 1,
    )


def mx_surrogate(x: Tensor, name: str, block_size: int, axis: int) -> Tensor:
    """`float_surrogate` with a constant scale for each block."""
    top = float(np.floor(np.log2(reference.float_levels(name)[-1])))
    largest = x.detach().movedim(axis, -1).unflatten(-1, (-1, block_size)).abs().amax(-1)
    scales = torch.where(largest > 0, 2 ** (torch.floor(torch.log2(largest)) - top), 1)
    return float_surrogate(x, scales.repeat_interleave(block_size, -1).movedim(-1, axis), name)


def mx_case(name: str, axis: int = -1) -> Case:
    """Blocks of 4 whose largest value is the format's largest, or saturates, or is small; one of zeros."""
    levels = reference.float_levels(name)
    top, small = float(levels[-1]), levels[1]
    binade = 2.0 ** np.floor(np.log2(top))
    saturating = [-(2 * binade - binade / 128), (top + 2 * binade) / 2, top, binade]
    ties = [top, small / 2, -small * 1.5, -float(levels[-2] + levels[-1]) / 2]
    inner = [binade * 1.25, -0.0, small, -small * 2.5]
    rows = [[ties, saturating], [[0.0] * 4, inner], [[-binade, top, 0.0, small], inner]]
    x = (tensor(rows) * tensor([[2.0**-8, 2.0**-5], [1.0, 2.0**-7], [2.0**-6, 2.0**-4]]).unsqueeze(-1)).reshape(3, 8)
    settings: dict[str, Any] = {"block_size": 4, "axis": axis}
    return Case(
        name=f"mx_quantize, {name}" + ("" if axis == -1 else f", axis {axis}"),
        function=partial(mx_quantize, format=name, **settings),
        inputs=((x if axis == -1 else x.T.contiguous()),),
        surrogate=partial(mx_surrogate, name=name, **settings),
        reference=partial(reference.mx, name=name, **settings),
        reference_gradient=lambda grad, x: reference.mx_gradients(x, name, grad=grad, **settings),
        elementwise=False,
        excused=dict.fromkeys(("monotone", "levels"), "each block has its own scale"),
    )


CASES: list[Case] = [
    *cases_weights.CASES,
    *(dorefa_activation_case(bits) for bits in (1, 2, 4)),
    *(apot_case(bits, signed) for bits, signed in ((3, True), (4, True), (5, True), (4, False))),
    n2uq_case(0),
    n2uq_case(-2),
    *(float_case(name) for name in reference.FORMATS),
    *(mx_case(name) for name in (*reference.FORMATS, "int8")),
    mx_case("e4m3", axis=0),
]
