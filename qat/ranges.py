"""Initial ranges: the (low, high) of a tensor that its grid covers.

Every function takes values of shape (groups, elements), one row per scale, and returns low and high of shape
(groups,). Rows are independent. Zero always lies inside, so that padding and ReLU stay exact.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from qat.functional.tensors import LARGEST_SCALE
from qat.kernels import plain_here
from qat.kernels.cpu import quantizers
from qat.spec import QuantSpec

_MSE_CANDIDATES = 80  # ranges that "mse" tries, each smaller by 1/80 of the min-max range


def initial_range(values: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return the range that `spec.init` finds: low (<= 0) and high (>= 0) in float32.

    A value that is NaN or infinite, or an empty row, is a ValueError.

    >>> low, high = initial_range(torch.tensor([[-1.0, 0.5, 2.0]]), QuantSpec(init="minmax"))
    >>> low.item(), high.item()
    (-1.0, 2.0)
    """
    values = values.detach().float()
    if values.dim() != 2 or values.shape[1] == 0:
        raise ValueError(f"initial_range: values must have shape (groups, elements >= 1), got {tuple(values.shape)}")
    require_finite(values, "initial_range: ")
    if spec.init == "percentile":
        return _percentile(values, spec.percentile)
    if spec.init == "mse":
        return _least_squares(values, spec)
    if spec.init == "lsq":
        return _lsq(values, spec)
    return _minmax(values)


class NotFiniteError(ValueError):
    """Raised for values from which no range can be found: one is NaN or infinite."""


def require_finite(values: Tensor, caller: str = "") -> None:
    """Raise a NotFiniteError if a value is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        raise NotFiniteError(f"{caller}the values hold NaN or infinity")


def require_in_reach(name: str, values: Tensor) -> Tensor:
    """Return the values of a learned scale; refuse those above its limit."""
    if bool((values > LARGEST_SCALE).any()):
        raise ValueError(f"{name} would be {float(values.max()):.3g}, and acts as at most 1e18; use the rule 'minmax'")
    return values


def scale_and_zero_point(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of the grid that covers low .. high.

    symmetric:  scale = max(|low| / |qmin|, |high| / qmax) (without low if unsigned), zero_point = 0
    affine:     scale = (high - low) / (qmax - qmin), zero_point = clamp(round(qmin - low / scale), qmin, qmax)

    On an affine grid the rounding of zero_point moves the bounds by up to half a step.
    An empty range (all values zero) gets the scale 1: every grid represents zeros. low <= 0 <= high have any shape,
    which scale (> 0) and zero_point (an integer, as float32) then have too.
    """
    if spec.symmetric:
        scale = high / spec.qmax
        if spec.signed:
            scale = torch.maximum(scale, low / spec.qmin)
    else:
        scale = (high - low) / (spec.qmax - spec.qmin)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # all values are zero
    if spec.symmetric:
        # In float32, high / (high / qmax) can exceed qmax by a bit, which would mask the gradient of the extreme value.
        over = high / scale > spec.qmax
        if spec.signed:
            over |= low / scale < spec.qmin
        scale = torch.where(over, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
        return scale, torch.zeros_like(scale)
    return scale, torch.clamp(torch.round(spec.qmin - low / scale), spec.qmin, spec.qmax)


def _minmax(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)


def _percentile(values: Tensor, percentile: float) -> tuple[Tensor, Tensor]:
    # Not torch.quantile, which refuses more than 16 million elements.
    count = values.shape[1]
    # A Fraction of the decimal digits: in floats, 99.9 / 100 * 1000 is above 999.
    rank = min(max(math.ceil(Fraction(str(percentile)) * count / 100), 1), count)
    high = values.kthvalue(rank, dim=1).values
    low = values.kthvalue(count - rank + 1, dim=1).values
    return low.clamp(max=0), high.clamp(min=0)


def _lsq(values: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    scale = 2 * values.abs().mean(1) / math.sqrt(spec.qmax)  # arXiv:1902.08153
    low, high = _minmax(values)
    if spec.symmetric:
        # A grid without negatives keeps the extreme, so that the caller sees that it cannot hold it.
        return torch.where(low < 0, scale * spec.qmin, low) if spec.signed else low, scale * spec.qmax
    width = scale * (spec.qmax - spec.qmin)
    below = torch.where(high > low, low / (low - high), 0)
    return -below * width, (1 - below) * width


def _squared_error(values: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec) -> Tensor:
    if len(values) == 1 and not plain_here() and quantizers.applies(values, scale, zero):
        return torch.tensor([quantizers.squared_error(values, scale, zero, spec.qmin, spec.qmax)])
    on_grid = (torch.clamp(torch.round(values / scale) + zero, spec.qmin, spec.qmax) - zero) * scale
    return (on_grid - values).square().sum(1)


def _least_squares(values: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    low, high = _minmax(values)
    best = torch.full_like(low, torch.inf)
    best_share = torch.ones_like(low)
    for step in range(_MSE_CANDIDATES, 0, -1):
        share = torch.full_like(low, step / _MSE_CANDIDATES)
        scale, zero = (part[:, None] for part in scale_and_zero_point(low * share, high * share, spec))
        error = _squared_error(values, scale, zero, spec)
        better = error < best  # of equal errors the wider range, which came first
        best = torch.where(better, error, best)
        best_share = torch.where(better, share, best_share)
    return low * best_share, high * best_share
