"""LSQ, affine LSQ+ and the range rules in NumPy float64, element by element, from the published formulas.

Written from shared/RECIPES.md (arXiv:1902.08153, arXiv:2004.09576) and the docstrings, not from the torch code.
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
    """Lowest and highest integer of a grid."""
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
    """Nearest integer, ties to even."""
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
