"""`grid_points`: the values at which an estimator has to be checked."""

import torch
from torch import Tensor

BESIDE_A_BOUND = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5)
BESIDE_ZERO = (0.0, 0.25, 0.5, 1.0, 1.3, 1.5, 2.5)


def grid_points(scale: float, zero_point: int, qmin: int, qmax: int) -> Tensor:
    """Values of x at which the rules for an integer grid differ from each other.

    x = scale * (q - zero_point) for q on both bounds, a quarter, a half and more inside and outside of them, far
    outside, at zero, and on ties of both parities (0.5 rounds down to the even 0, 1.5 up to the even 2). If float64
    has a suitable value, x / scale is exactly q - zero_point, so a tie is a tie for every scale.

    Args:
        scale: step of the grid, > 0, in the unit of x.
        zero_point: the integer that represents 0.0.
        qmin, qmax: lowest and highest integer.

    Returns:
        Float64, one axis, ascending, without duplicates.

    Raises:
        ValueError: if scale is not positive and finite, or qmin >= qmax.

    >>> grid_points(0.5, 0, 0, 1).tolist()[6:15]
    [-0.25, -0.125, 0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.65]
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"grid_points: scale must be positive and finite, got {scale}")
    if qmin >= qmax:
        raise ValueError(f"grid_points: qmin must be below qmax, got qmin={qmin} and qmax={qmax}")
    span = qmax - qmin
    codes = {qmin - span - 3.3, qmax + span + 3.3}
    for sign in (-1, 1):
        codes |= {bound + sign * offset for bound in (qmin, qmax) for offset in BESIDE_A_BOUND}
        codes |= {zero_point + sign * offset for offset in BESIDE_ZERO}
    v = torch.tensor(sorted({code - zero_point for code in codes}), dtype=torch.float64)
    x = v * scale
    for neighbour in (x, torch.nextafter(x, x + scale), torch.nextafter(x, x - scale)):
        x = torch.where((x / scale != v) & (neighbour / scale == v), neighbour, x)
    return x
