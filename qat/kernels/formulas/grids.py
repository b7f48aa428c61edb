"""A learned grid in torch operations, as in `grids.h`: codes of values, slopes, the gradient of the scale.

    code = clamp(round(x / step) + zero, low, high), with zero, low and high shifted so that codes fit uint8

Step and zero stay tensors, so that nothing waits for their values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGEST = 1e18
"""The upper bound of a learned scale."""


class TensorGrid(NamedTuple):
    """An integer grid: step, without axes; zero as well, or a plain number; lowest and highest code."""

    step: Tensor
    zero: Tensor | float
    low: float
    high: float


def step_in_force(scale: Tensor, smallest: Tensor) -> Tensor:
    """min(max(scale, smallest), 1e18); NaN acts as smallest, as `positive_scale` reads it."""
    return torch.where(scale >= smallest, scale, smallest).clamp(max=LARGEST)


def grid_of(grid: list[Any], levels: Sequence[float]) -> TensorGrid:
    """The grid of a quantizer, from its tensors (one number each) and `Levels`."""
    (scale, smallest, zero_point), (low, high, shift, *_) = grid, levels
    step = step_in_force(scale.reshape(()), smallest.reshape(()))
    if zero_point is None:
        return TensorGrid(step, float(shift), low + shift, high + shift)
    zero = zero_point.reshape(()).round().clamp(low, high)
    return TensorGrid(step, zero + shift, low + shift, high + shift)


def codes_of(values: Tensor, grid: TensorGrid, pattern: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of values, in the strides of `pattern`, and their `qparams`: step and zero.

    The step is NaN if one of the values is NaN; the code of that value is arbitrary. Codes are small, so their sum is
    NaN in this case only, and no value has to be read.
    """
    codes = (values / grid.step).round_().add_(grid.zero).clamp_(grid.low, grid.high)
    total = codes.sum()
    step = torch.where(total.isnan(), total, grid.step)
    zero = grid.zero if isinstance(grid.zero, Tensor) else torch.full_like(step, grid.zero)
    return torch.empty_like(pattern, dtype=torch.uint8).copy_(codes), torch.stack([step, zero])


def slopes(v: Tensor, low: Any, high: Any) -> tuple[Tensor, Tensor]:
    """Whether the gradient passes at v = x / step, low <= v <= high, and the slope: round(v) - v, or the bound."""
    bounded = torch.clamp(v, low, high)
    inside = bounded == v
    return inside, torch.where(inside, torch.round(v) - v, bounded)


def slopes_on(values: Tensor, grid: TensorGrid) -> tuple[Tensor, Tensor]:
    """`slopes` of values on a grid."""
    return slopes(values / grid.step, grid.low - grid.zero, grid.high - grid.zero)


def clipped_slopes(values: Tensor, clip: list[float], grid: TensorGrid) -> tuple[Tensor, Tensor]:
    """`slopes_on` behind a clip, which passes a gradient only strictly between floor and ceiling."""
    floor, ceiling = clip
    inside, slope = slopes_on(values.clamp(floor, ceiling), grid)
    return inside & (values > floor) & (values < ceiling), slope


def learned_gradient(total: Tensor, grid: list[Any], levels: Sequence[float]) -> Tensor:
    """The gradient of scales, in their shape: total * factor, times step^2 if `relative`.

    `total` are the gradients of the steps. A scale below its lower bound gets no gradient that would lower
    it further.
    """
    (scale, smallest, *_), (*_, factor, relative) = grid, levels
    gradient = total.reshape(scale.shape) * factor
    least = smallest.reshape(scale.shape)
    if relative:
        step = step_in_force(scale, least)
        gradient = gradient * step * step  # one factor at a time: the square of a small step may underflow
    return torch.where((scale < least) & (gradient > 0), 0.0, gradient)
