"""Grids of activations as uint8 codes: which quantizers have them, and their numbers."""

import torch
from torch import Tensor, nn

from qat.kernels import integers as kernels
from qat.kernels.integers import CodeGrid, Numbers
from qat.quantizer import Quantizer

SHIFT = 128
"""Added to the integers and zero points of signed grids, so that all codes are uint8."""


def shift_of(quantizer: Quantizer) -> int:
    """What a quantizer's codes have more than its integers."""
    return SHIFT if quantizer.bounds()[0] < 0 else 0


def numbers_of(quantizer: Quantizer) -> Numbers:
    """The grid of a quantizer of activations, as uint8 codes."""
    scale, zero_point = quantizer.grid()
    shift = shift_of(quantizer)
    low, high = (float(bound + shift) for bound in quantizer.bounds())
    return Numbers(CodeGrid(float(scale), float(zero_point) + shift, low, high))


def has_codes(module: nn.Module | None) -> bool:
    """Whether a quantizer's integers fit one byte, and are round(x / scale) + zero_point, halves to even."""
    if not isinstance(module, Quantizer) or not (module.has_integers and module.is_calibrated) or module.is_disabled:
        return False
    low, high = (bound + shift_of(module) for bound in module.bounds())
    return module.spec.granularity == "tensor" and low >= 0 and high < 256 and rounds_half_to_even(module)


@torch.no_grad()
def rounds_half_to_even(quantizer: Quantizer) -> bool:
    """Whether codes(x) = clamp(round(x / scale) + zero_point) between the levels too, halves to the even integer.

    So every runtime computes an activation's integers from scale and zero point; a weight's are stored.
    """
    if quantizer.role == "weight":
        return True
    scale, zero_point = quantizer.grid()
    low, high = quantizer.bounds()
    x = (torch.arange(low, high, device=scale.device) + 0.5 - zero_point) * scale
    return torch.equal(quantizer.codes(x), torch.clamp(torch.round(x / scale) + zero_point, low, high))


def holds_bound(bound: float, step: float, zero: float, low: float, high: float) -> bool:
    """Whether a bound of values lies on a level of a grid, or beyond all of them."""
    level = bound / step + zero
    return not low < level < high or abs(level - round(level)) < 1e-4


def all_values(source: Numbers) -> Tensor:
    """The 256 values of a grid, those outside its bounds included."""
    return kernels.dequantize(torch.arange(256, dtype=torch.uint8), source)
