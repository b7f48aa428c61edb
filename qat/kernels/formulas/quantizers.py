"""Formulas that quantize a tensor, or the sum of two quantized tensors; see `qat.kernels.operators.quantizers`.

Values and gradients may be float32, bfloat16 or float16; all arithmetic is in float32.
"""

from typing import Any

import torch
from torch import Tensor

from qat.kernels.formulas.grids import clipped_slopes, codes_of, grid_of, in_layout_of, learned_gradient, slopes_on


def quantize_codes(x: Tensor, grid: list[Any], levels: list[float]) -> tuple[Tensor, Tensor]:
    """codes = clamp(round(x / step) + zero_point, low, high) + shift."""
    return codes_of(x.to(torch.float32), grid_of(grid, levels), x)


def quantize_codes_backward(
    grad: Tensor, x: Tensor, grid: list[Any], levels: list[float], needs_x: bool
) -> tuple[Tensor, Tensor]:
    """dx = grad inside;  dscale = factor * sum(grad * slope)."""
    inside, slope = slopes_on(x.to(torch.float32), grid_of(grid, levels))
    total = (grad.to(torch.float32) * slope).sum()
    grad_x = in_layout_of(torch.where(inside, grad, 0), x, x.dtype) if needs_x else x.new_empty(0)
    return grad_x, learned_gradient(total, grid, levels)


def add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: list[Any],
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, *clip), where a and b are codes with the same strides."""
    z = dequantize(a, a_qparams).add_(dequantize(b, b_qparams)).clamp_(*clip)
    return codes_of(z, grid_of(grid, levels), a)


def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: list[Any],
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, grad inside the grid and strictly inside the clip, and factor * sum(grad * slope)."""
    z = dequantize(a, a_qparams).add_(dequantize(b, b_qparams))
    passes, slope = clipped_slopes(z, clip, grid_of(grid, levels))
    total = (grad.to(torch.float32) * slope).sum()
    grad_sum = in_layout_of(torch.where(passes, grad, 0), a, grad.dtype)
    return grad_sum, learned_gradient(total, grid, levels)


def dequantize(codes: Tensor, qparams: Tensor) -> Tensor:
    """(codes - zero) * step in float32; not in place: an in-place last operation costs a Function its gradient."""
    return (codes.to(torch.float32) - qparams[1]) * qparams[0]
