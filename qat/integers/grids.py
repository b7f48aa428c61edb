"""What grids of activations have to be for runtimes and formats."""

import torch

from qat.quantizer import Quantizer


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
