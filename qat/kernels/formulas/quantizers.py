"""Formulas that quantize: a tensor, and a sum of two quantized tensors; see `qat.kernels.operators.quantizers`.

Values and gradients may be float32, bfloat16 or float16; everything is computed in float32.
"""

import torch
from torch import Tensor

from qat.kernels.formulas.grids import (
    clipped_slopes,
    decoded,
    encoded,
    learned_gradient,
    learned_grid,
    like,
    slopes_on,
)


def quantize_codes(
    x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int,
    factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """codes = clamp(round(x / step) + zero_point, low, high) + shift."""
    return encoded(x.to(torch.float32), learned_grid(scale, smallest, zero_point, low, high, shift), x)


def quantize_codes_backward(
    grad: Tensor, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int,
    shift: int, factor: float, relative: bool, needs_x: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx = grad inside;  dscale = factor * sum(grad * slope)."""
    inside, slope = slopes_on(x.to(torch.float32), learned_grid(scale, smallest, zero_point, low, high, shift))
    total = (grad.to(torch.float32) * slope).sum()
    grad_x = like(torch.where(inside, grad, 0), x, x.dtype) if needs_x else x.new_empty(0)
    return grad_x, learned_gradient(total, scale, smallest, factor, relative)


def add_quantize(
    a: Tensor, b: Tensor, a_numbers: Tensor, b_numbers: Tensor, floor: float, ceiling: float, scale: Tensor,
    smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, floor, ceiling), both codes themselves, of the same strides."""
    z = decoded(a, a_numbers).add_(decoded(b, b_numbers)).clamp_(floor, ceiling)
    return encoded(z, learned_grid(scale, smallest, zero_point, low, high, shift), a)


def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_numbers: Tensor, b_numbers: Tensor, floor: float, ceiling: float,
    scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float,
    relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, which is that of both operands, and of scale.

    d(a + b) = grad inside the grid and strictly inside the clamp;  dscale = factor * sum(grad * slope)
    """
    z = decoded(a, a_numbers).add_(decoded(b, b_numbers))
    grid = learned_grid(scale, smallest, zero_point, low, high, shift)
    passes, slope = clipped_slopes(z, floor, ceiling, grid)
    total = (grad.to(torch.float32) * slope).sum()
    grad_sum = like(torch.where(passes, grad, 0), a, grad.dtype)
    return grad_sum, learned_gradient(total, scale, smallest, factor, relative)


def dequantize(codes: Tensor, numbers: Tensor) -> Tensor:
    """(codes - zero) * step in float32; not in place, which as a Function's last operation costs it its gradient."""
    return (codes.to(torch.float32) - numbers[1]) * numbers[0]
