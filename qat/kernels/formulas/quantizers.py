"""Formulas that quantize a tensor, or the sum of two quantized tensors; see `qat.kernels.operators.quantizers`.

Values and gradients may be float32, bfloat16 or float16; all arithmetic is in float32.
"""

import torch
from torch import Tensor

from qat.kernels.formulas.grids import (
    clipped_slopes,
    codes_of,
    grid_of,
    learned_gradient,
    like,
    slopes_on,
)


def quantize_codes(
    x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int,
    factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """codes = clamp(round(x / step) + zero_point, low, high) + shift."""
    return codes_of(x.to(torch.float32), grid_of(scale, smallest, zero_point, low, high, shift), x)


def quantize_codes_backward(
    grad: Tensor, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int,
    shift: int, factor: float, relative: bool, needs_x: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx = grad inside;  dscale = factor * sum(grad * slope)."""
    inside, slope = slopes_on(x.to(torch.float32), grid_of(scale, smallest, zero_point, low, high, shift))
    total = (grad.to(torch.float32) * slope).sum()
    grad_x = like(torch.where(inside, grad, 0), x, x.dtype) if needs_x else x.new_empty(0)
    return grad_x, learned_gradient(total, scale, smallest, factor, relative)


def add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, floor: float, ceiling: float, scale: Tensor,
    smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, floor, ceiling), where a and b are codes with the same strides."""
    z = dequantize(a, a_qparams).add_(dequantize(b, b_qparams)).clamp_(floor, ceiling)
    return codes_of(z, grid_of(scale, smallest, zero_point, low, high, shift), a)


def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, floor: float, ceiling: float,
    scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float,
    relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, which is the gradient of both operands, and that of scale.

    d(a + b) = grad inside the grid and strictly inside the clamp;  dscale = factor * sum(grad * slope)
    """
    z = dequantize(a, a_qparams).add_(dequantize(b, b_qparams))
    grid = grid_of(scale, smallest, zero_point, low, high, shift)
    passes, slope = clipped_slopes(z, floor, ceiling, grid)
    total = (grad.to(torch.float32) * slope).sum()
    grad_sum = like(torch.where(passes, grad, 0), a, grad.dtype)
    return grad_sum, learned_gradient(total, scale, smallest, factor, relative)


def dequantize(codes: Tensor, qparams: Tensor) -> Tensor:
    """(codes - zero) * step in float32; not in place: an in-place last operation costs a Function its gradient."""
    return (codes.to(torch.float32) - qparams[1]) * qparams[0]
