"""Rows of the proof matrix for the rules whose levels come from the whole tensor or channel (DoReFa, binary, ternary,
APoT's normalization) or are no integer grid (APoT, N2UQ, low-precision floats, MX blocks).

The surrogates have the published gradients, whatever their values; the references are in reference_codebooks.py.
Input points are multiples of small powers of two, so that bounds and ties stay bounds and ties in every dtype.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.functional.codebooks.apot import apot_quantize, normalize_weight
from qat.functional.codebooks.binary import binary_quantize
from qat.functional.codebooks.floats import float_quantize, mx_quantize
from qat.functional.codebooks.n2uq import n2uq_quantize
from qat.functional.codebooks.ternary import ternary_quantize, ttq_quantize
from qat.functional.dorefa import dorefa_quantize_activation, dorefa_quantize_weight
from tests.references import reference as signs
from tests.references import reference_codebooks as reference
from tests.references.cases_uniform import SIGN_SURROGATES, error_decay_surrogate
from tests.references.estimator_case import Case, clip, straight_through, tensor

WEIGHT = (-1.5, -1.25, -1.0, -0.75, -0.4375, -0.125, -0.0625, -0.0, 0.0, 0.03125, 0.21875, 0.5625, 0.875, 1.0, 1.125)
WEIGHT += (1.5, 0.3125, -0.28125, -0.9375, 0.6875, 0.34375, -0.53125, 1.3125, -1.1875)
"""Both bounds of a gradient clipped at 1, values on either side, zeros of both signs, and the maximum twice."""


def channels(*magnitudes: float) -> Tensor:
    """One channel of WEIGHT for each magnitude, with a spatial axis of 3: shape (channels, 8, 3)."""
    return torch.stack([tensor(WEIGHT).roll(5 * i).reshape(8, 3) * size for i, size in enumerate(magnitudes)])


def reduced(x: Tensor, channel_axis: reference.ChannelAxis) -> list[int]:
    axes = () if channel_axis is None else (channel_axis,) if isinstance(channel_axis, int) else channel_axis
    return [axis for axis in range(x.ndim) if axis not in {kept % x.ndim for kept in axes}]


def scales_of(x: Tensor, channel_axis: reference.ChannelAxis) -> int:
    """The number of parts of x with a scale of their own."""
    return len(list(reference.groups(tuple(x.shape), channel_axis)))


def own_scales(channel_axis: reference.ChannelAxis) -> dict[str, str]:
    """The property that a rule loses if each channel has its own scale."""
    return {} if channel_axis is None else {"monotone": "only within a channel: each has its own scale"}


UNBOUNDED = {"outside": "nothing is clipped: the gradient passes everywhere"}


def dorefa_surrogate(w: Tensor, bits: int, channel_axis: reference.ChannelAxis) -> Tensor:
    t = torch.tanh(w)
    return w.clone() if bits == 1 else t / t.abs().amax(reduced(w, channel_axis), keepdim=True)


def dorefa_weight_case(bits: int, channel_axis: reference.ChannelAxis) -> Case:
    place = "per tensor" if channel_axis is None else "per channel"
    excused = UNBOUNDED | own_scales(channel_axis)
    excused["zero"] = "an even number of levels, symmetric about 0: none is 0"
    if bits > 2:  # at 2 bits the four levels are too far apart
        excused["idempotent"] = "tanh moves the levels before they are rounded again"
    zero_channel = (0.0,) if bits == 1 and channel_axis is not None else ()
    w = channels(1.0, 0.25, *zero_channel, 3.0)
    return Case(name=f"dorefa_quantize_weight, {bits} bit, {place}",
                function=partial(dorefa_quantize_weight, bits=bits, channel_axis=channel_axis), inputs=(w,),
                surrogate=partial(dorefa_surrogate, bits=bits, channel_axis=channel_axis),
                reference=lambda w: reference.dorefa_weight(w, bits, channel_axis),
                reference_gradient=lambda grad, w: reference.dorefa_weight_gradients(w, bits, grad, channel_axis),
                elementwise=False, levels=2 * scales_of(w, channel_axis) if bits == 1 else 2**bits,
                excused=excused)  # fmt: skip


def normalize_case(channel_axis: reference.ChannelAxis) -> Case:
    def surrogate(w: Tensor) -> Tensor:
        axes = reduced(w, channel_axis)
        deviation = w.std(axes, correction=0, keepdim=True).clamp(min=1e-5)
        return (w - w.mean(axes, keepdim=True).detach()) / deviation.detach()

    excused = UNBOUNDED | own_scales(channel_axis)
    excused |= {"levels": "no quantizer: what comes before one", "zero": "the mean moves to 0"}
    return Case(name=f"normalize_weight, {'per tensor' if channel_axis is None else 'per channel'}",
                function=partial(normalize_weight, channel_axis=channel_axis),
                inputs=(channels(1.0, 0.25, 0.0, 4.0) + 0.375,), surrogate=surrogate,
                reference=lambda w: reference.normalize(w, channel_axis),
                reference_gradient=lambda grad, w: reference.normalize_gradients(w, grad, channel_axis),
                elementwise=False, excused=excused)  # fmt: skip


def binary_case(gradient: str, channel_axis: reference.ChannelAxis, progress: float | None = None) -> Case:
    """`progress`, if given, is a second input, which gets no gradient."""
    excused = {"zero": "two levels, neither of them 0"} | own_scales(channel_axis)
    if gradient not in ("clipped", "approximate"):
        excused |= UNBOUNDED
    w, variant, given = channels(1.0, 0.25, 0.0, 2.0), gradient, []
    rule, surrogate = signs.sign(gradient), SIGN_SURROGATES.get(gradient)
    if progress is not None:
        variant, given = f"{gradient} at {progress}", [tensor(progress)]
        rule, surrogate = signs.ERROR_DECAY_SIGN, error_decay_surrogate
    return Case(name=f"binary_quantize, {variant}, channel_axis {channel_axis}",
                function=lambda w, progress=None: binary_quantize(w, channel_axis, gradient, progress),
                inputs=(w, *given), surrogate=surrogate,
                reference=lambda w, *_: reference.binary(w, channel_axis), reference_gradient=rule.backward,
                elementwise=False, levels=2 * scales_of(w, channel_axis), excused=excused)  # fmt: skip


def ternary_case(channel_axis: reference.ChannelAxis) -> Case:
    w = channels(1.0, 0.25, 0.0, 2.0)
    return Case(name=f"ternary_quantize, channel_axis {channel_axis}",
                function=partial(ternary_quantize, channel_axis=channel_axis), inputs=(w,), surrogate=torch.clone,
                reference=lambda w: reference.ternary(w, channel_axis),
                reference_gradient=lambda grad, w: (grad.copy(),), elementwise=False,
                levels=2 * scales_of(w, channel_axis) + 1, excused=UNBOUNDED | own_scales(channel_axis))  # fmt: skip


def ttq_gradient(grad: Tensor, w: Tensor, positive: Tensor, negative: Tensor, threshold: float) -> tuple[Tensor, ...]:
    """The published rule, which no function has as gradient: that of w depends on the levels, but not vice versa."""
    sizes = (1,) * (w.ndim - positive.ndim) + tuple(positive.shape)
    bound = threshold * w.detach().abs().amax([axis for axis, size in enumerate(sizes) if size == 1], keepdim=True)
    above, below = w > bound, w < -bound
    grad_w = grad * torch.where(above, positive, torch.where(below, negative, torch.ones_like(w)))
    grad_positive, grad_negative = torch.where(above, grad, 0), torch.where(below, -grad, 0)
    return grad_w, grad_positive.sum_to_size(positive.shape), grad_negative.sum_to_size(negative.shape)


def ttq_case(name: str, positive: Any, negative: Any, channel_axis: reference.ChannelAxis) -> Case:
    """The largest weight is 2, so 0.125 lies on the threshold and belongs to neither set."""
    threshold = 0.0625
    w = clip(channels(2.0, 1.0, 0.0), -2.0, 2.0)
    return Case(name=f"ttq_quantize, {name}", function=partial(ttq_quantize, threshold=threshold),
                inputs=(w, tensor(positive), tensor(negative)), gradient=partial(ttq_gradient, threshold=threshold),
                reference=lambda w, positive, negative: reference.ttq(w, positive, negative, threshold),
                reference_gradient=lambda grad, *inputs: reference.ttq_gradients(*inputs, threshold, grad),
                broadcast=(1, 2), elementwise=False, levels=2 * scales_of(w, channel_axis) + 1,
                excused=UNBOUNDED | own_scales(channel_axis))  # fmt: skip


WEIGHT_CASES: list[Case] = [
    *(dorefa_weight_case(bits, axis) for bits in (1, 2, 4) for axis in (None, 0)),
    normalize_case(None),
    normalize_case(0),
    *(binary_case("clipped", axis) for axis in (0, (0, 1), None)),
    binary_case("approximate", 0),
    binary_case("straight_through", 0),
    *(binary_case("error_decay", 0, progress) for progress in (0.0, 0.3, 1.0)),
    ternary_case(0),
    ternary_case(None),
    ttq_case("per tensor", 0.9, 1.3, None),
    ttq_case("per channel", [[[0.9]], [[0.4]], [[2.1]]], [[[1.3]], [[0.7]], [[1.9]]], 0),
]


def dorefa_activation_case(bits: int) -> Case:
    points = [-20.0, -0.25, -0.0, 0.0, 0.125, 0.28125, 0.5, 0.71875, 0.9375, 1.0, 1.0078125, 1.5, 20.0]  # 0.5: a tie
    return Case(name=f"dorefa_quantize_activation, {bits} bits",
                function=partial(dorefa_quantize_activation, bits=bits), inputs=(tensor(points),),
                surrogate=lambda x: clip(x, 0.0, 1.0), rule=reference.dorefa_activation(bits),
                levels=2**bits)  # fmt: skip


def surrogate_of_levels(
    x: Tensor, scale: Tensor, levels: Sequence[Any], signed: bool = True, even: bool = False
) -> Tensor:
    """LSQ's gradient for any levels: within the bounds x plus a constant residual; a tie stays below, or is even."""
    top, middles = float(levels[-1]), tensor([float(sum(map(Fraction, pair)) / 2) for pair in pairwise(levels)])
    v = (x / scale).detach()
    bounded = clip(v, -top if signed else 0.0, top)
    below, above = (torch.bucketize(bounded.abs(), middles, right=right) for right in (False, True))
    nearest = torch.where(below % 2 == 0, below, above) if even else below
    level = torch.sign(bounded) * tensor([float(each) for each in levels])[nearest]
    return torch.where(v == bounded, x + scale * (level - v), scale * level)


def apot_case(bits: int, signed: bool) -> Case:
    """The points include every tie of the grid; alpha is chosen so that alpha * (sum of two levels) / 2 is exact."""
    levels, rule = reference.apot_levels(bits - 1 if signed else bits), reference.apot(bits, signed)
    alpha = float({2: 2.0, 3: 1.25, 4: 1.5}[bits - 1 if signed else bits])
    ties = [float((low + high) / 2 * Fraction(alpha)) for low, high in pairwise(levels)]
    points = [0.0, 0.34375, 0.71875, 0.9375, 1.0625, alpha / 2, alpha, alpha + 0.0625, 1.5 * alpha, 20.0, *ties]
    points = points[: len(points) // 2 * 2]
    x = tensor([points, [-point for point in points]]).reshape(2, -1, 2)
    return Case(name=f"apot_quantize, {'signed' if signed else 'unsigned'} {bits} bits",
                function=partial(apot_quantize, bits=bits, signed=signed), inputs=(x, tensor(alpha)),
                surrogate=partial(surrogate_of_levels, levels=levels, signed=signed), rule=rule, broadcast=(1,),
                levels=2**bits - 1 if signed else 2**bits)  # fmt: skip


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
    return Case(name=f"n2uq_quantize, qmin {qmin}", function=partial(n2uq_quantize, qmin=qmin),
                inputs=(tensor(points).reshape(4, 5), tensor(-0.75), tensor([1.0, 0.5, 0.5, 2.0]), tensor(0.3)),
                surrogate=partial(n2uq_surrogate, qmin=qmin), reference=partial(reference.n2uq, qmin=qmin),
                reference_gradient=lambda grad, *inputs: reference.n2uq_gradients(*inputs, grad, qmin), levels=5,
                excused={"idempotent": "input thresholds and output levels are independent of each other",
                         "zero": "the learned thresholds decide which level 0 falls to"})  # fmt: skip


def float_points(name: str) -> list[float]:
    """Around zero, around the smallest normal number, around the largest: the numbers and the ties between them."""
    levels = reference.float_levels(name)
    normal = 2 ** reference.FORMATS[name][1]
    chosen = sorted({0, 1, 2, normal - 1, normal, normal + 1, len(levels) - 3, len(levels) - 2, len(levels) - 1})
    ties = [(levels[k] + levels[k + 1]) / 2 for k in chosen[:-1]]
    between = [0.75 * levels[1], 1.25 * levels[normal]]
    points = [*levels[chosen], *ties, *between, 1.03125 * levels[-1], 1.0625 * levels[-1], 4 * levels[-1]]
    return [float(point) for point in points[: len(points) // 2 * 2]]


def float_case(name: str) -> Case:
    points, levels = float_points(name), reference.float_levels(name)
    return Case(name=f"float_quantize, {name}", function=partial(float_quantize, format=name),
                inputs=(0.25 * tensor([points, [-point for point in points]]).reshape(2, -1, 2), tensor(0.25)),
                surrogate=partial(surrogate_of_levels, levels=levels, even=True), rule=reference.float_quantize(name),
                broadcast=(1,), levels=2 * len(levels) - 1)  # fmt: skip


def mx_surrogate(x: Tensor, name: str, block_size: int, axis: int) -> Tensor:
    """The scale of each block is a constant."""
    top = float(np.floor(np.log2(reference.float_levels(name)[-1])))
    largest = x.detach().movedim(axis, -1).unflatten(-1, (-1, block_size)).abs().amax(-1)
    scales = torch.where(largest > 0, 2 ** (torch.floor(torch.log2(largest)) - top), 1)
    scales = scales.repeat_interleave(block_size, -1).movedim(-1, axis)
    return surrogate_of_levels(x, scales, reference.float_levels(name))


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
        function=partial(mx_quantize, format=name, **settings), inputs=((x if axis == -1 else x.T.contiguous()),),
        surrogate=partial(mx_surrogate, name=name, **settings), reference=partial(reference.mx, name=name, **settings),
        reference_gradient=lambda grad, x: reference.mx_gradients(x, name, grad=grad, **settings), elementwise=False,
        excused=dict.fromkeys(("monotone", "levels"), "each block has its own scale"),
    )  # fmt: skip


CASES: list[Case] = [
    *WEIGHT_CASES,
    *(dorefa_activation_case(bits) for bits in (1, 2, 4)),
    *(apot_case(bits, signed) for bits, signed in ((3, True), (4, True), (5, True), (4, False))),
    n2uq_case(0),
    n2uq_case(-2),
    *(float_case(name) for name in reference.FORMATS),
    *(mx_case(name) for name in (*reference.FORMATS, "int8")),
    mx_case("e4m3", axis=0),
]
