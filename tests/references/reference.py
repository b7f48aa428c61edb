"""LSQ, affine LSQ+ and the range rules in NumPy float64, element by element, from the published formulas.

Written from shared/RECIPES.md (arXiv:1902.08153, arXiv:2004.09576) and the docstrings, not from the torch code. The
functions that return gradients take `grad`, the gradient of the loss with respect to the output.
"""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def bounds(bits: int, signed: bool, narrow: bool = False) -> tuple[int, int]:
    """Lowest and highest integer of a grid."""
    if not signed:
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)) + (1 if narrow else 0), 2 ** (bits - 1) - 1


def codes(x: Array, scale: Array, zero_point: Array, qmin: int, qmax: int) -> Array:
    """ONNX QuantizeLinear: round half to even first, add the zero point after, saturate last."""
    return np.clip(np.rint(x / scale) + zero_point, qmin, qmax)


def integer_zero(zero_point: Array, qmin: int, qmax: int) -> Array:
    """The integer of the grid as which a learned zero point acts."""
    return np.clip(np.rint(zero_point), qmin, qmax)


def lsq(x: Array, scale: Array, qmin: int, qmax: int) -> Array:
    """The paper's order of operations: clip, then round."""
    return scale * np.rint(np.clip(x / scale, qmin, qmax))


def lsq_gradients(
    x: Array, scale: Array, qmin: int, qmax: int, grad: Array, grad_factor: float = 1.0
) -> tuple[Array, Array]:
    """Gradients of x and scale; a value exactly on a bound is inside."""
    full = np.broadcast_to(scale, x.shape)
    grad_x, slope = np.empty_like(x), np.empty_like(x)
    for index in np.ndindex(*x.shape):
        v = x[index] / full[index]
        if v < qmin:
            grad_x[index], slope[index] = 0.0, qmin
        elif v > qmax:
            grad_x[index], slope[index] = 0.0, qmax
        else:
            grad_x[index], slope[index] = grad[index], np.rint(v) - v
    return grad_x, grad_factor * sum_to(grad * slope, scale.shape)


def lsq_plus(x: Array, scale: Array, zero_point: Array, qmin: int, qmax: int) -> Array:
    """LSQ+ with the offset -scale * z, z the zero point on the integer grid."""
    zero = integer_zero(zero_point, qmin, qmax)
    return scale * codes(x, scale, zero, qmin, qmax) - scale * zero


def lsq_plus_gradients(
    x: Array, scale: Array, zero_point: Array, qmin: int, qmax: int, grad: Array, grad_factor: float = 1.0
) -> tuple[Array, Array, Array]:
    """Gradients of x, scale and zero_point; outside they are those of y = scale * (bound - zero_point)."""
    full_scale = np.broadcast_to(scale, x.shape)
    full_zero = np.broadcast_to(integer_zero(zero_point, qmin, qmax), x.shape)
    grad_x, slope_scale, slope_zero = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    for index in np.ndindex(*x.shape):
        step, zero = full_scale[index], full_zero[index]
        v = x[index] / step
        if qmin <= v + zero <= qmax:
            grad_x[index], slope_scale[index], slope_zero[index] = grad[index], np.rint(v) - v, 0.0
        else:
            bound = qmin if v + zero < qmin else qmax
            grad_x[index], slope_scale[index], slope_zero[index] = 0.0, bound - zero, -step
    return (
        grad_x,
        grad_factor * sum_to(grad * slope_scale, scale.shape),
        grad_factor * sum_to(grad * slope_zero, zero_point.shape),
    )


def sum_to(values: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which a parameter of this shape was broadcast."""
    padded = (1,) * (values.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return np.asarray(values.sum(axis=axes, keepdims=True)).reshape(shape)


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
