"""A quantizer's learned numbers as the kernels need them: read from its tensors once, its gradient made from sums."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.cpu import Grid

LARGEST = 1e12
"""What a learned scale acts as at most."""


class Levels(NamedTuple):
    """What a quantizer is besides its tensors.

    Attributes:
        low, high: lowest and highest code.
        shift: what codes and zero point are moved by, so that they fit uint8.
        factor: of the scale's gradient.
        relative: whether that is multiplied by the square of the step, too.
    """

    low: int
    high: int
    shift: int
    factor: float
    relative: bool


def grid_in_force(scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels) -> Grid:
    """The grid that a learned scale stands for: at least `smallest`; shifted to uint8."""
    step = min(max(scale.item(), smallest.item()), LARGEST)
    zero = 0.0 if zero_point is None else zero_point.item()
    return Grid(step, zero + levels.shift, levels.low + levels.shift, levels.high + levels.shift)


def numbers_of(grid: Grid, bad: bool = False) -> Tensor:
    """Step and zero as a tensor, for those who read the codes; the step is NaN if there was one among the values."""
    return torch.tensor([math.nan if bad else grid.step, grid.zero])


def step_and_zero(numbers: Tensor) -> tuple[float, float]:
    """What `numbers_of` wrote."""
    step, zero = numbers.tolist()
    return step, zero


def scale_gradient(total: float, scale: Tensor, smallest: Tensor, levels: Levels) -> Tensor:
    """The gradient of the learned scale from that of the step.

    Where the scale acts as more than it is, a gradient that would lower it further is dropped.
    """
    value, least = scale.item(), smallest.item()
    gradient = total * levels.factor * (min(max(value, least), LARGEST) ** 2 if levels.relative else 1.0)
    return torch.full_like(scale, 0.0 if value < least and gradient > 0 else gradient)
