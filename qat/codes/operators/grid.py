"""A quantizer's grid as kernels take it, and the same in torch operations.

code = clamp(round(x / step) + zero, low, high), with zero, low and high shifted so that codes fit uint8, as in grids.h.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qat.functional.tensors import LARGEST_SCALE
from qat.kernels.cpu.quantizers import Levels, is_float32_on, scales_of
from qat.kernels.cpu.structures import GridTensors
from qat.quantizer import Quantizer
from qat.quantizer.registry import estimator_of

SHIFT = 128
"""Difference between an integer in uint8 and the same in int8."""


def shift_of(quantizer: Quantizer) -> int:
    """Return how much larger a quantizer's codes, which are uint8, are than its integers."""
    return SHIFT if quantizer.bounds()[0] < 0 else 0


def codes_refusal(quantizer: Quantizer) -> str | None:
    """Return why a quantizer's output cannot be held as codes, or None."""
    spec = quantizer.spec
    if spec.granularity != "tensor":
        return f"it has a scale per {spec.granularity}, and codes have one"
    return rule_refusal(quantizer)


def rule_refusal(quantizer: Quantizer) -> str | None:
    """Return why kernels do not compute a quantizer's rule, or None if they do."""
    spec = quantizer.spec
    if estimator_of(quantizer) != "lsq":
        return f"kernels compute the rule 'lsq', and {type(quantizer).__name__} computes something else"
    if spec.ewgs != "none":
        return f"ewgs={spec.ewgs!r} corrects its gradient, which kernels do not"
    return f"it has {spec.bits} bits, and a code has 8" if spec.bits > 8 else None


def mode_refusal(quantizer: Quantizer) -> str | None:
    """Return why a quantizer does not quantize as in training, or None if it does."""
    if not quantizer.training:
        return "it is in evaluation"
    if quantizer.observer is not None:
        return "it observes a range"
    if quantizer.is_disabled:
        return "it is switched off"
    return None if quantizer.is_calibrated else "it is not calibrated"


class Learned(NamedTuple):
    """A quantizer's grid as kernels take it; zero_point is None on a symmetric grid."""

    scale: Tensor
    smallest: Tensor
    zero_point: Tensor | None
    levels: Levels


NOT_TAKEN = "its scale or zero point is not a contiguous float32 tensor on its device"
"""The reason if `learned_by` finds nothing."""


def learned_by(quantizer: Quantizer, x: Tensor, scales: int | None = 1) -> Learned | None:
    """Return what kernels need to put x on a quantizer's grid, or None.

    `scales` is how many the kernel takes; None for as many as there are.
    """
    # Each attribute is read once, since a model of 50 layers asks 100 times a step.
    scale, smallest, zero_point = quantizer.scale, quantizer.smallest_scale, quantizer.zero_point
    count = scale.numel() if scales is None else scales
    for tensor in (scale, smallest) if zero_point is None else (scale, smallest, zero_point):
        if not is_float32_on(tensor, x.device) or tensor.numel() != count or not tensor.is_contiguous():
            return None
    return Learned(scale, smallest, zero_point, levels_of(quantizer, x))


# The latest levels of each quantizer, and what they follow from.
_LATEST: WeakKeyDictionary[Quantizer, tuple[object, Levels]] = WeakKeyDictionary()


def levels_of(quantizer: Quantizer, x: Tensor) -> Levels:
    """Return the levels of a quantizer; another shape of x changes them."""
    basis = (quantizer.spec, quantizer.role, x.shape)
    latest = None if torch.compiler.is_compiling() else _LATEST.get(quantizer)
    if latest is not None and latest[0] == basis:
        return latest[1]
    (low, high), shift = quantizer.bounds(), shift_of(quantizer)
    factor, relative = quantizer.gradient_factor(x), quantizer.relative_steps
    levels = Levels(float(low), float(high), float(shift), float(factor), float(relative))
    if not torch.compiler.is_compiling():
        _LATEST[quantizer] = basis, levels
    return levels


class TensorGrid(NamedTuple):
    """An integer grid as tensors."""

    step: Tensor  # without axes
    zero: Tensor | float  # without axes too
    low: float  # the lowest code
    high: float


def step_in_force(scale: Tensor, smallest: Tensor) -> Tensor:
    """Return min(max(scale, smallest), 1e18); NaN acts as smallest."""
    return torch.where(scale >= smallest, scale, smallest).clamp(max=LARGEST_SCALE)


def grid_in_force(grid: GridTensors, levels: Sequence[float]) -> TensorGrid:
    """Return the grid of a quantizer, from its tensors (one number each) and `Levels`."""
    (scale, smallest), zero_point, (low, high, shift, *_) = scales_of(grid), grid[2], levels
    step = step_in_force(scale.reshape(()), smallest.reshape(()))
    if zero_point is None:
        return TensorGrid(step, float(shift), low + shift, high + shift)
    zero = zero_point.reshape(()).round().clamp(low, high)
    return TensorGrid(step, zero + shift, low + shift, high + shift)


def codes_of(values: Tensor, grid: TensorGrid, pattern: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of values, in the strides of `pattern`, and their step and zero.

    The step is NaN if one of the values is NaN; the code of that value is arbitrary.
    """
    codes = (values / grid.step).round_().add_(grid.zero).clamp_(grid.low, grid.high)
    total = codes.sum()  # codes are small: it is NaN if a value is, and in no other case
    step = torch.where(total.isnan(), total, grid.step)
    zero = grid.zero if isinstance(grid.zero, Tensor) else torch.full_like(step, grid.zero)
    return torch.empty_like(pattern, dtype=torch.uint8).copy_(codes), torch.stack([step, zero])


def slopes(v: Tensor, low: Any, high: Any) -> tuple[Tensor, Tensor]:
    """Return where the gradient passes at v = x / step, and the slope."""
    bounded = torch.clamp(v, low, high)
    inside = bounded == v
    return inside, torch.where(inside, torch.round(v) - v, bounded)


def slopes_on(values: Tensor, grid: TensorGrid) -> tuple[Tensor, Tensor]:
    """Return the `slopes` of values on a grid."""
    return slopes(values / grid.step, grid.low - grid.zero, grid.high - grid.zero)


def clipped_slopes(values: Tensor, clip: list[float], grid: TensorGrid) -> tuple[Tensor, Tensor]:
    """Return `slopes_on` behind a clip, whose gradient passes strictly inside."""
    floor, ceiling = clip
    inside, slope = slopes_on(values.clamp(floor, ceiling), grid)
    return inside & (values > floor) & (values < ceiling), slope


def learned_gradient(total: Tensor, grid: GridTensors, levels: Sequence[float]) -> Tensor:
    """Return the gradient of scales: total * factor, times step^2 if `relative`."""
    (scale, smallest), (*_, factor, relative) = scales_of(grid), levels
    gradient = total.reshape(scale.shape) * factor
    least = smallest.reshape(scale.shape)
    if relative:
        step = step_in_force(scale, least)
        gradient = gradient * step * step  # one factor at a time: the square of a small step may underflow
    return torch.where((scale < least) & (gradient > 0), 0.0, gradient)
