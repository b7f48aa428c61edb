"""The uniform rules, the primitives and the ranges in NumPy float64, element by element, from the published formulas.

Written from shared/RECIPES.md, the papers and the docstrings, not from the torch code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Slopes = tuple[float | None, ...]


def bounds(bits: int, signed: bool, narrow: bool = False) -> tuple[int, int]:
    if not signed:
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)) + (1 if narrow else 0), 2 ** (bits - 1) - 1


def codes(x: Any, scale: Any, zero_point: Any, qmin: int, qmax: int) -> Any:
    """ONNX QuantizeLinear: round half to even first, add the zero point after, saturate last."""
    return np.clip(np.rint(x / scale) + zero_point, qmin, qmax)


def integer_zero(zero_point: Any, qmin: int, qmax: int) -> Any:
    """The integer of the grid as which a learned zero point acts."""
    return np.clip(np.rint(zero_point), qmin, qmax)


def sum_to(values: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which a parameter of this shape was broadcast."""
    padded = (1,) * (values.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return np.asarray(values.sum(axis=axes, keepdims=True)).reshape(shape)


@dataclass(frozen=True)
class Rule:
    """A published rule in scalars, run over arrays: `value(x, *parameters)` and `slopes(x, *parameters)`.

    The slopes are the derivatives that its paper assigns to x and to each parameter (None: the rule gives it no
    gradient). With `of_gradient`, slopes takes the incoming gradient first: EWGS looks at its sign.
    """

    value: Callable[..., float]
    slopes: Callable[..., Slopes]
    of_gradient: bool = False

    def forward(self, x: Array, *parameters: Array) -> Array:
        full = [np.broadcast_to(parameter, x.shape) for parameter in parameters]
        y = np.empty_like(x)
        for index in np.ndindex(*x.shape):
            y[index] = self.value(float(x[index]), *(float(each[index]) for each in full))
        return y

    def backward(self, grad: Array, x: Array, *parameters: Array) -> tuple[Array | None, ...]:
        """Gradients of x and of each parameter, summed over the axes along which it was broadcast."""
        full = [np.broadcast_to(parameter, x.shape) for parameter in parameters]
        parts: list[Array | None] = [np.zeros_like(x) for _ in range(1 + len(full))]
        for index in np.ndindex(*x.shape):
            incoming = (float(grad[index]),) if self.of_gradient else ()
            numbers = (float(x[index]), *(float(each[index]) for each in full))
            for slot, slope in enumerate(self.slopes(*incoming, *numbers)):
                part = parts[slot]
                if slope is None or part is None:
                    parts[slot] = None
                else:
                    part[index] = grad[index] * slope
        shapes = (x.shape, *(parameter.shape for parameter in parameters))
        return tuple(None if part is None else sum_to(part, shape) for part, shape in zip(parts, shapes, strict=True))


def rint(x: float) -> float:
    return float(np.rint(x))


def within(x: float, low: float, high: float) -> float:
    """1 inside, the bounds included, else 0."""
    return 1.0 if low <= x <= high else 0.0


def lsq(qmin: int, qmax: int, grad_factor: float = 1.0) -> Rule:
    """The paper's order of operations: clip, then round; a value exactly on a bound is inside."""

    def slopes(x: float, scale: float) -> Slopes:
        v = x / scale
        if within(v, qmin, qmax):
            return 1.0, grad_factor * (rint(v) - v)
        return 0.0, grad_factor * (qmin if v < qmin else qmax)

    return Rule(lambda x, scale: scale * rint(min(max(x / scale, qmin), qmax)), slopes)


def lsq_plus(qmin: int, qmax: int, grad_factor: float = 1.0) -> Rule:
    """LSQ+ with the offset -scale * z, z the zero point on the integer grid; outside y = scale * (bound - z)."""

    def value(x: float, scale: float, zero_point: float) -> float:
        zero = integer_zero(zero_point, qmin, qmax)
        return scale * codes(x, scale, zero, qmin, qmax) - scale * zero

    def slopes(x: float, scale: float, zero_point: float) -> Slopes:
        v, zero = x / scale, integer_zero(zero_point, qmin, qmax)
        if within(v + zero, qmin, qmax):
            return 1.0, grad_factor * (rint(v) - v), 0.0
        bound = qmin if v + zero < qmin else qmax
        return 0.0, grad_factor * (bound - zero), -grad_factor * scale

    return Rule(value, slopes)


def grid_of(low: float, high: float, qmin: int, qmax: int, symmetric: bool) -> tuple[float, float]:
    """Scale and zero point of the grid that covers low .. high; scale 1 for an empty range."""
    if symmetric:
        return max(high / qmax, low / qmin if qmin < 0 else 0.0) or 1.0, 0.0
    scale = (high - low) / (qmax - qmin) or 1.0
    return scale, float(np.clip(np.rint(qmin - low / scale), qmin, qmax))


def minmax(row: Array) -> tuple[float, float]:
    """Extremes, zero always inside."""
    return min(0.0, row.min()), max(0.0, row.max())


def percentile(row: Array, percent: str) -> tuple[float, float]:
    """Nearest rank at either end: the k-th smallest and k-th largest value, k = ceil(percent/100 * n) exactly."""
    ordered = np.sort(row)
    rank = math.ceil(Fraction(percent) * len(row) / 100)
    return min(0.0, ordered[len(row) - rank]), max(0.0, ordered[rank - 1])


def lsq_scale(row: Array, qmax: int) -> float:
    """The paper's initial scale."""
    return float(2 * np.abs(row).mean() / math.sqrt(qmax))


def squared_errors(row: Array, qmin: int, qmax: int, symmetric: bool, steps: int = 80) -> list[float]:
    """Squared error for each candidate range k/steps * (low, high), k = 1 .. steps."""
    low, high = minmax(row)
    errors = []
    for k in range(1, steps + 1):
        scale, zero = grid_of(low * k / steps, high * k / steps, qmin, qmax, symmetric)
        on_grid = scale * (codes(row, np.float64(scale), np.float64(zero), qmin, qmax) - zero)
        errors.append(float(((on_grid - row) ** 2).sum()))
    return errors


def sech_squared(z: float) -> float:
    """1 / cosh(z)^2 without overflow."""
    small = math.exp(-abs(z))
    return (2 * small / (1 + small * small)) ** 2


# Roundings (arXiv:1308.3432): any rounding, the gradient of the identity.
ROUND = Rule(rint, lambda x: (1.0,))
FLOOR = Rule(lambda x: float(math.floor(x)), lambda x: (1.0,))
CEIL = Rule(lambda x: float(math.ceil(x)), lambda x: (1.0,))
TRUNC = Rule(lambda x: float(math.trunc(x)), lambda x: (1.0,))
STOCHASTIC_ROUND = Rule(lambda x, noise: math.floor(x) + (noise < x - math.floor(x)), lambda x, noise: (1.0, None))


def clamp(straight_through: bool) -> Rule:
    """x between two bounds. Each bound has the gradient of the elements that it holds back."""
    return Rule(
        lambda x, low, high: min(max(x, low), high),
        lambda x, low, high: (
            1.0 if straight_through else within(x, low, high),
            1.0 if x < low else 0.0,
            1.0 if x > high else 0.0,
        ),
    )


def sign_slope(gradient: str, x: float) -> float:
    """clipped: hard tanh. approximate: the derivative of Bi-Real's two parabolas (arXiv:1808.00278)."""
    if gradient == "straight_through":
        return 1.0
    if abs(x) > 1:
        return 0.0
    return 1.0 if gradient == "clipped" else 2 - 2 * abs(x)


def sign(gradient: str) -> Rule:
    """Two levels, 0 counts as positive."""
    return Rule(lambda x: 1.0 if x >= 0 else -1.0, lambda x: (sign_slope(gradient, x),))


def error_decay_slopes(x: float, progress: float) -> Slopes:
    """IR-Net (arXiv:1909.10788): k t (1 - tanh(t x)^2); t goes from 0.1 to 10 in the course of the training."""
    t = 0.1 * 10 ** (2 * progress)
    return max(1 / t, 1.0) * t * sech_squared(t * x), None


ERROR_DECAY_SIGN = Rule(lambda x, progress: 1.0 if x >= 0 else -1.0, error_decay_slopes)


def ternary_sign(gradient: str) -> Rule:
    """Three levels; a value at the threshold still gives 0."""
    return Rule(lambda x, threshold: 0.0 if abs(x) <= threshold else math.copysign(1.0, x),
                lambda x, threshold: (sign_slope(gradient, x), None))  # fmt: skip


def positive_scale_slopes(grad: float, scale: float, smallest: float) -> Slopes:
    """Descent lowers a scale whose gradient is positive: not below the floor."""
    return 0.0 if scale < smallest and grad > 0 else 1.0, None


POSITIVE_SCALE = Rule(lambda scale, smallest: min(max(scale, smallest), 1e18), positive_scale_slopes, of_gradient=True)


def ewgs_slope(grad: float, v: float, delta: float) -> float:
    """EWGS (arXiv:2104.00903): stretched where the step takes v away from its level, else shrunk."""
    return 1 + delta * float(np.sign(grad)) * (v - rint(v))


EWGS_ROUND = Rule(lambda x, delta: rint(x), lambda grad, x, delta: (ewgs_slope(grad, x, delta), None), of_gradient=True)
EWGS_GRADIENT = Rule(lambda x, scale, delta: x,
                     lambda grad, x, scale, delta: (ewgs_slope(grad, x / scale, delta), None, None),
                     of_gradient=True)  # fmt: skip


def soft_round_value(x: float, temperature: float) -> float:
    """One sigmoid a step, scaled to run from 0 to 1: with sig(z) = (1 + tanh(z/2))/2 it is a tanh."""
    offset = x - math.floor(x) - 0.5
    return math.floor(x) + 0.5 + math.tanh(temperature * offset / 2) / (2 * math.tanh(temperature / 4))


def soft_round_slopes(x: float, temperature: float) -> Slopes:
    offset = x - math.floor(x) - 0.5
    top, bottom = math.tanh(temperature * offset / 2), math.tanh(temperature / 4)
    top_slope = sech_squared(temperature * offset / 2)
    to_x = temperature / 2 * top_slope / (2 * bottom)
    to_temperature = offset / 2 * top_slope / (2 * bottom) - top * sech_squared(temperature / 4) / (8 * bottom**2)
    return to_x, to_temperature


SOFT_ROUND = Rule(soft_round_value, soft_round_slopes)


def dsq_slopes(x: float, alpha: float) -> Slopes:
    """DSQ (arXiv:1908.05033): s tanh(k (r - 1/2)) with tanh(k/2) = 1 - alpha = 1/s, so k = log(2/alpha - 1)."""
    offset = x - math.floor(x) - 0.5
    k, s = math.log(2 / alpha - 1), 1 / (1 - alpha)
    k_slope, s_slope = -2 / (alpha * (2 - alpha)), 1 / (1 - alpha) ** 2
    bend = sech_squared(k * offset)
    return s * k * bend / 2, (s_slope * math.tanh(k * offset) + s * bend * offset * k_slope) / 2


DSQ_ROUND = Rule(lambda x, alpha: rint(x), dsq_slopes)


def pact(bits: int) -> Rule:
    """PACT (arXiv:1805.06085): 2^bits - 1 steps from 0 to a learned clipping value; at x = alpha both slopes are 1."""
    steps = 2**bits - 1
    return Rule(lambda x, alpha: alpha / steps * rint(min(max(x, 0.0), alpha) * steps / alpha),
                lambda x, alpha: (within(x, 0.0, alpha), 1.0 if x >= alpha else 0.0))  # fmt: skip


def learned_bits(signed: bool) -> Rule:
    """Learned bit-width (arXiv:1905.11452): step = reach / qmax(n), n whole; outside y = +-reach whatever n."""

    def grid(bits: float) -> tuple[float, float, float]:
        half = 2.0 ** (rint(bits) - 1 if signed else rint(bits))
        return (1 - half if signed else 0.0), half - 1, half * math.log(2)

    def value(x: float, reach: float, bits: float) -> float:
        qmin, qmax, _ = grid(bits)
        return reach / qmax * min(max(rint(x / (reach / qmax)), qmin), qmax)

    def slopes(x: float, reach: float, bits: float) -> Slopes:
        qmin, qmax, qmax_slope = grid(bits)
        v = x / (reach / qmax)
        if within(v, qmin, qmax):
            residual = rint(v) - v
            return 1.0, residual / qmax, -residual * reach / qmax**2 * qmax_slope
        return 0.0, (qmin if v < qmin else qmax) / qmax, 0.0

    return Rule(value, slopes)


def power_of_two(up: bool) -> Rule:
    """2^round(log2 s), TQT's ceil with `up` (arXiv:1903.08066); in the log domain the rounding is the identity."""

    def value(scale: float) -> float:
        mantissa, exponent = math.frexp(scale)  # scale = mantissa * 2^exponent, 1/2 <= mantissa < 1
        if up:
            return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
        return 2.0 ** (exponent - 1 if mantissa < math.sqrt(0.5) else exponent)

    return Rule(value, lambda scale: (value(scale) / scale,))
