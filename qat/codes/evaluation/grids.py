"""Grids of activations as uint8 codes: which quantizers have them, and their numbers."""

import torch
from torch import Tensor, nn

from qat.codes.evaluation import arithmetic
from qat.codes.evaluation.arithmetic import CodeGrid
from qat.codes.operators.grid import SHIFT
from qat.integers.frozen import rounds_half_to_even
from qat.quantizer import Quantizer


def shift_of(quantizer: Quantizer) -> int:
    """What a quantizer's codes have more than its integers."""
    return SHIFT if quantizer.bounds()[0] < 0 else 0


def code_grid_of(quantizer: Quantizer) -> CodeGrid:
    """The grid of a quantizer of activations, as uint8 codes."""
    scale, zero_point = quantizer.grid()
    shift = shift_of(quantizer)
    low, high = (float(bound + shift) for bound in quantizer.bounds())
    return CodeGrid(float(scale), float(zero_point) + shift, low, high)


def has_codes(module: nn.Module | None) -> bool:
    """Whether a quantizer's integers fit one byte, and are round(x / scale) + zero_point, halves to even."""
    if not isinstance(module, Quantizer) or not (module.has_integers and module.is_calibrated) or module.is_disabled:
        return False
    low, high = (bound + shift_of(module) for bound in module.bounds())
    return module.spec.granularity == "tensor" and low >= 0 and high < 256 and rounds_half_to_even(module)


def all_values(source: CodeGrid) -> Tensor:
    """The 256 values of a grid, those outside its bounds included."""
    return arithmetic.dequantize(torch.arange(256, dtype=torch.uint8), source)
