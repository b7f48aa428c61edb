"""A quantizer's grid as kernels take it, and the same in torch operations, as in `grids.h`.

code = clamp(round(x / step) + zero, low, high), with zero, low and high shifted so that codes fit uint8
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qat.functional.tensors import LARGEST_SCALE
from qat.kernels.cpu.quantizers import Levels, is_float32_on
from qat.quantizer import Quantizer
from qat.quantizer.registry import estimator_of

SHIFT = 128
"""Added to the codes and zero points of signed grids, so that all codes are uint8."""


def codes_refusal(quantizer: Quantizer) -> str | None:
    """Why a quantizer's output cannot be held as codes; None if it can: the rule `lsq`, one scale, at most 8 bits."""
    spec = quantizer.spec
    if spec.granularity != "tensor":
        return f"it has a scale per {spec.granularity}, and codes have one"
    return rule_refusal(quantizer)


def rule_refusal(quantizer: Quantizer) -> str | None:
    """Why kernels do not compute a quantizer's rule; None if they do."""
    spec = quantizer.spec
    if estimator_of(quantizer) != "lsq":
        return f"kernels compute the rule 'lsq', and {type(quantizer).__name__} computes something else"
    if spec.ewgs != "none":
        return f"ewgs={spec.ewgs!r} corrects its gradient, which kernels do not"
    return f"it has {spec.bits} bits, and a code has 8" if spec.bits > 8 else None


def mode_refusal(quantizer: Quantizer) -> str | None:
    """Why a quantizer does not quantize as in training; None if it does."""
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
"""Why `learned_by` finds nothing."""


def learned_by(quantizer: Quantizer, x: Tensor, scales: int | None = 1) -> Learned | None:
    """What kernels need to put x on a quantizer's grid; None if they do not take its tensors.

    Each attribute is read once, since a model of 50 layers asks 100 times a step. scales: how many the kernel takes;
    None: as many as there are.
    """
    scale, smallest, zero_point = quantizer.scale, quantizer.smallest_scale, quantizer.zero_point
    count = scale.numel() if scales is None else scales
    for tensor in (scale, smallest) if zero_point is None else (scale, smallest, zero_point):
        if not is_float32_on(tensor, x.device) or tensor.numel() != count or not tensor.is_contiguous():
            return None
    return Learned(scale, smallest, zero_point, levels_of(quantizer, x))


_LATEST: WeakKeyDictionary[Quantizer, tuple[object, Levels]] = WeakKeyDictionary()
"""The latest levels of each quantizer, and what they follow from."""


def levels_of(quantizer: Quantizer, x: Tensor) -> Levels:
    """Bounds, shift, and the factor on the scale's gradient; worked out again only for another shape of x."""
    basis = (quantizer.spec, quantizer.role, x.shape)
    latest = None if torch.compiler.is_compiling() else _LATEST.get(quantizer)
    if latest is not None and latest[0] == basis:
        return latest[1]
    (low, high), shift = quantizer.bounds(), SHIFT if quantizer.spec.signed else 0
    factor, relative = quantizer.gradient_factor(x), quantizer.relative_steps
    levels = Levels(float(low), float(high), float(shift), float(factor), float(relative))
    if not torch.compiler.is_compiling():
        _LATEST[quantizer] = basis, levels
    return levels


class TensorGrid(NamedTuple):
    """An integer grid: step, without axes; zero as well, or a plain number; lowest and highest code."""

    step: Tensor
    zero: Tensor | float
    low: float
    high: float


def step_in_force(scale: Tensor, smallest: Tensor) -> Tensor:
    """min(max(scale, smallest), 1e18); NaN acts as smallest, as `positive_scale` reads it."""
    return torch.where(scale >= smallest, scale, smallest).clamp(max=LARGEST_SCALE)


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
