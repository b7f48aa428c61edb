"""Estimators whose levels are no plain integer grid, in NumPy float64, element by element, from the published formulas.

DoReFa, APoT, binary and ternary weights, N2UQ, low-precision floats and MX blocks. Written from shared/RECIPES.md, the
papers and the OCP specifications, not from the torch code: as a `Rule` where it is one, else with `*_gradients` that
take `grad`, the gradient of the loss with respect to the output. Float levels are decoded from every bit pattern, so
nothing here rounds a mantissa.
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from tests.references.reference import Array, Rule, Slopes, rint, sum_to, within

ChannelAxis = int | tuple[int, ...] | None


def groups(shape: tuple[int, ...], channel_axis: ChannelAxis) -> Iterator[tuple[slice, ...]]:
    """One index for every part of a tensor that has its own statistics."""
    axes = () if channel_axis is None else (channel_axis,) if isinstance(channel_axis, int) else channel_axis
    kept = {axis % len(shape) for axis in axes}
    choices = [
        [slice(i, i + 1) for i in range(size)] if axis in kept else [slice(None)] for axis, size in enumerate(shape)
    ]
    return itertools.product(*choices)


def sign(x: Array) -> Array:
    """Two levels: 0 gives +1."""
    return np.where(x >= 0, 1.0, -1.0)


# DoReFa, arXiv:1606.06160


def dorefa_weight(w: Array, bits: int, channel_axis: ChannelAxis = None) -> Array:
    """Equation 9 of the paper; one bit: equation 8, the mean over each group."""
    y, n = np.empty_like(w), 2**bits - 1
    for index in groups(w.shape, channel_axis):
        part = w[index]
        if bits == 1:
            y[index] = sign(part) * np.abs(part).mean()
        else:
            t = np.tanh(part)
            y[index] = 2 * np.rint((t / (2 * (np.abs(t).max() or 1.0)) + 0.5) * n) / n - 1
    return y


def dorefa_weight_gradients(w: Array, bits: int, grad: Array, channel_axis: ChannelAxis = None) -> tuple[Array]:
    """With the rounding as identity y = t / max|t|, t = tanh(w): quotient rule, ties of the maximum share evenly."""
    if bits == 1:
        return (grad.copy(),)
    grad_w = np.empty_like(w)
    for index in groups(w.shape, channel_axis):
        t, g = np.tanh(w[index]), grad[index]
        largest = np.abs(t).max()
        at_largest = np.abs(t) == largest
        through_max = -(g * t).sum() / largest**2 * np.sign(t) * at_largest / at_largest.sum()
        grad_w[index] = (g / largest + through_max) * (1 - t**2)
    return (grad_w,)


def dorefa_activation(bits: int) -> Rule:
    n = 2**bits - 1
    return Rule(lambda x: rint(min(max(x, 0.0), 1.0) * n) / n, lambda x: (within(x, 0.0, 1.0),))


# APoT, arXiv:1909.13144


def apot_levels(m: int) -> list[Fraction]:
    """All sums of the additive terms, over their maximum.

    Even m = 2n: n terms {0, 2^-i, 2^-(i+n), 2^-(i+2n)}, i = 0 .. n-1. Odd m = 2n + 1: n terms {0, 2^-i, 2^-(i+n),
    2^-(i+2n+1)} and one of {0, 2^-2n}. m = 1 has the last alone.
    """
    n, odd = divmod(m, 2)
    terms = [[-i, -(i + n), -(i + 2 * n + odd)] for i in range(n)] + [[-2 * n]] * odd
    choices = [[Fraction(0)] + [Fraction(2) ** exponent for exponent in term] for term in terms]
    sums = sorted({sum(choice) for choice in itertools.product(*choices)})
    return [level / sums[-1] for level in sums]


def apot_level(x: float, alpha: float, bits: int, signed: bool) -> float:
    """Signed level of one number, decided in exact arithmetic; a tie goes to the smaller magnitude."""
    levels = apot_levels(bits - 1 if signed else bits)
    v = Fraction(x) / Fraction(alpha)
    magnitude = min(abs(v), Fraction(1)) if signed or v > 0 else Fraction(0)
    nearest = min(levels, key=lambda level: (abs(level - magnitude), level))
    return math.copysign(float(nearest), x) if nearest else 0.0


def apot(bits: int, signed: bool = True) -> Rule:
    """Reparameterised clipping, equation 8 of the paper."""
    lowest = -1.0 if signed else 0.0

    def slopes(x: float, alpha: float) -> Slopes:
        v = x / alpha
        if within(v, lowest, 1.0):
            return 1.0, apot_level(x, alpha, bits, signed) - v
        return 0.0, 1.0 if v > 1 else lowest

    return Rule(lambda x, alpha: alpha * apot_level(x, alpha, bits, signed), slopes)


def normalize(w: Array, channel_axis: ChannelAxis = None) -> Array:
    """Section 2.3 of the paper; 1e-5, which it adds to the deviation, is the least one here."""
    y = np.empty_like(w)
    for index in groups(w.shape, channel_axis):
        y[index] = (w[index] - w[index].mean()) / max(w[index].std(), 1e-5)
    return y


def normalize_gradients(w: Array, grad: Array, channel_axis: ChannelAxis = None) -> tuple[Array]:
    grad_w = np.empty_like(w)
    for index in groups(w.shape, channel_axis):
        grad_w[index] = grad[index] / max(w[index].std(), 1e-5)
    return (grad_w,)


# Binary and ternary weights


def binary(w: Array, channel_axis: ChannelAxis) -> Array:
    """XNOR-Net, arXiv:1603.05279."""
    return dorefa_weight(w, 1, channel_axis)


def ternary(w: Array, channel_axis: ChannelAxis) -> Array:
    """TWN, arXiv:1605.04711: the approximate threshold and the scale that is best for it."""
    y = np.zeros_like(w)
    for index in groups(w.shape, channel_axis):
        kept = np.abs(w[index]) > 0.7 * np.abs(w[index]).mean()
        scale = np.abs(w[index])[kept].mean() if kept.any() else 0.0
        y[index] = np.where(kept, scale * np.sign(w[index]), 0)
    return y


def ttq_threshold(w: Array, positive: Array, threshold: float) -> Array:
    """Share of the largest magnitude over the axes along which `positive` has one value."""
    padded = (1,) * (w.ndim - positive.ndim) + positive.shape
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return np.broadcast_to(threshold * np.abs(w).max(axis=axes, keepdims=True), w.shape)


def ttq(w: Array, positive: Array, negative: Array, threshold: float) -> Array:
    """Equation 6 of arXiv:1612.01064."""
    bound = ttq_threshold(w, positive, threshold)
    return np.where(w > bound, positive, np.where(w < -bound, -negative, 0.0))


def ttq_gradients(
    w: Array, positive: Array, negative: Array, threshold: float, grad: Array
) -> tuple[Array, Array, Array]:
    """Equations 7 and 8; the sign of the second follows from the level -negative."""
    bound = ttq_threshold(w, positive, threshold)
    above, below = w > bound, w < -bound
    slope = np.where(above, positive, np.where(below, negative, 1.0))
    return grad * slope, sum_to(grad * above, positive.shape), sum_to(-grad * below, negative.shape)


# N2UQ, arXiv:2111.14826


def n2uq_level(x: float, start: float, widths: Array) -> int:
    """How many thresholds, the middles of the segments, lie below x."""
    knots = [start + float(sum(widths[:k])) for k in range(len(widths))]
    return sum(x > knot + width / 2 for knot, width in zip(knots, widths, strict=True))


def n2uq(x: Array, start: Array, widths: Array, step: Array, qmin: int = 0) -> Array:
    level = np.reshape([n2uq_level(value, float(start), widths) for value in x.flat], x.shape)
    return step * (qmin + level)


def n2uq_gradients(
    x: Array, start: Array, widths: Array, step: Array, grad: Array, qmin: int = 0
) -> tuple[Array, Array, Array, Array]:
    """Those of the line through the points (knot k, step * (qmin + k)), on an inner knot from its left; step: level."""
    grad_x, grad_start, grad_widths, grad_step = np.zeros_like(x), 0.0, np.zeros_like(widths), 0.0
    for index in np.ndindex(*x.shape):
        value, g = x[index], grad[index]
        grad_step += g * (qmin + n2uq_level(value, float(start), widths))
        for k, width in enumerate(widths):
            knot = float(start) + float(sum(widths[:k]))
            if (knot < value or (k == 0 and knot == value)) and value <= knot + width:
                slope = g * float(step) / width
                grad_x[index] = slope
                grad_start -= slope  # moving the start moves every knot
                grad_widths[:k] -= slope  # a wider segment before this one moves its knot
                grad_widths[k] -= slope * (value - knot) / width
    return grad_x, np.array(grad_start), grad_widths, np.array(grad_step)


# Low-precision floats: OCP 8-bit Floating Point 1.0, OCP Microscaling Formats 1.0

FORMATS = {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}
NOT_NUMBERS = {"e4m3": 1, "e5m2": 4}
"""How many of the highest positive codes are NaN or infinity: S.1111.111 of e4m3, S.11111.xx of e5m2."""


def float_levels(name: str) -> Array:
    """The non-negative finite numbers in the order of their codes; int8: the two's complement of 1.6 bits, no -2."""
    if name == "int8":
        return np.arange(128) / 64
    exponent_bits, mantissa_bits = FORMATS[name]
    bias, levels = 2 ** (exponent_bits - 1) - 1, []
    for code in range(2 ** (exponent_bits + mantissa_bits) - NOT_NUMBERS.get(name, 0)):
        exponent, fraction = code >> mantissa_bits, (code % 2**mantissa_bits) / 2**mantissa_bits
        levels.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return np.array(levels)


def float_cast(v: float, levels: Array) -> float:
    """The nearest number, of two the one with the even code; beyond the largest that one."""
    distance = np.abs(levels - min(abs(v), levels[-1]))
    nearest = np.flatnonzero(distance == distance.min())
    return math.copysign(levels[nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]], v)


def float_quantize(name: str) -> Rule:
    levels = float_levels(name)

    def slopes(x: float, scale: float) -> Slopes:
        v = x / scale
        if abs(v) <= levels[-1]:
            return 1.0, float_cast(v, levels) - v
        return 0.0, math.copysign(levels[-1], v)

    return Rule(lambda x, scale: scale * float_cast(x / scale, levels), slopes)


def mx_scales(x: Array, name: str, block_size: int, axis: int) -> Array:
    """The shared scale of every element: section 6.3 of the specification, held in 8 exponent bits (E8M0)."""
    scales = np.moveaxis(np.empty_like(x), axis, -1)
    lines = np.moveaxis(x, axis, -1)
    top = math.frexp(float_levels(name)[-1])[1] - 1
    for line in np.ndindex(*lines.shape[:-1]):
        for begin in range(0, lines.shape[-1], block_size):
            block = slice(begin, begin + block_size)
            largest = np.abs(lines[line][block]).max()
            exponent = math.frexp(largest)[1] - 1 - top if largest else 0
            scales[line][block] = 2.0 ** min(max(exponent, -127), 127)
    return np.moveaxis(scales, -1, axis)


def mx(x: Array, name: str, block_size: int, axis: int) -> Array:
    return float_quantize(name).forward(x, mx_scales(x, name, block_size, axis))


def mx_gradients(x: Array, name: str, block_size: int, axis: int, grad: Array) -> tuple[Array]:
    """The scales are constants."""
    saturated = np.abs(x) > float_levels(name)[-1] * mx_scales(x, name, block_size, axis)
    return (np.where(saturated, 0, grad),)
