"""Operators that quantize: a tensor, what BatchNorm and ReLU make of a tensor, a sum of two quantized tensors.

All read the learned numbers (scale, smallest, zero_point, and the fields of `Levels`) from the quantizer's own tensors,
and return codes with `numbers`, the step and zero that stand for them. A gradient that is not wanted comes back empty.
"""

import torch
from torch import Tensor

from qat.kernels import chains
from qat.kernels.chains import ClippedGrid, Norm, Operand
from qat.kernels.cpu import grid_gradients, like
from qat.kernels.learned import Levels, grid_in_force, numbers_of, scale_gradient, step_and_zero
from qat.kernels.operator import operator


def _codes_like(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.uint8), torch.empty(2)


def _if_wanted(x: Tensor, wanted: bool) -> Tensor:
    return torch.empty_like(x) if wanted else x.new_empty(0)


@operator(_codes_like)
def quantize_codes(
    x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int,
    factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """codes = clamp(round(x / step) + zero_point, low, high) + shift."""
    grid = grid_in_force(scale, smallest, zero_point, Levels(low, high, shift, factor, relative))
    codes, bad = chains.quantize_codes(x, grid)
    return codes, numbers_of(grid, bad)


@operator(
    lambda grad, x, scale, smallest, zero_point, low, high, shift, factor, relative, needs_x: (
        _if_wanted(x, needs_x), torch.empty_like(scale)
    )
)  # fmt: skip
def quantize_codes_backward(
    grad: Tensor, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int,
    shift: int, factor: float, relative: bool, needs_x: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and scale."""
    levels = Levels(low, high, shift, factor, relative)
    grid = grid_in_force(scale, smallest, zero_point, levels)
    grad_x, total, _ = grid_gradients(like(grad, x), x, grid, needs_x)
    return x.new_empty(0) if grad_x is None else grad_x, scale_gradient(total, scale, smallest, levels)


@operator(lambda y, eps: tuple(torch.empty(y.shape[1 if y.dim() > 3 else -1]) for _ in range(3)))
def batch_statistics(y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of every channel the mean, 1 / sqrt(variance + eps), and the unbiased variance."""
    channels = y.shape[1 if y.dim() > 3 else -1]
    running, variance = torch.zeros(channels), torch.zeros(channels)
    mean, inverse = chains.statistics(y, eps, (running, variance), 1.0)
    return mean, inverse, variance


@operator(_codes_like)
def norm_quantize(
    y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor, floor: float, ceiling: float,
    scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float,
    relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp((y - mean) * inverse * gamma + beta, floor, ceiling)."""
    grid = grid_in_force(scale, smallest, zero_point, Levels(low, high, shift, factor, relative))
    norm = Norm(gamma, beta, mean, inverse)
    codes, bad = chains.norm_quantize(y, norm, ClippedGrid(grid, floor, ceiling))
    return codes, numbers_of(grid, bad)


@operator(
    lambda grad, y, gamma, beta, mean, inverse, floor, ceiling, scale, *rest: (
        _if_wanted(y, rest[-1]), torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(scale)
    )
)  # fmt: skip
def norm_quantize_backward(
    grad: Tensor, y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor, floor: float, ceiling: float,
    scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float,
    relative: bool, follows_batch: bool, needs_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of y, gamma, beta and scale."""
    levels = Levels(low, high, shift, factor, relative)
    clipped = ClippedGrid(grid_in_force(scale, smallest, zero_point, levels), floor, ceiling)
    grad_y, grad_gamma, grad_beta, total = chains.norm_quantize_backward(
        like(grad, y), y, Norm(gamma, beta, mean, inverse), clipped, follows_batch, needs_y
    )
    return (
        y.new_empty(0) if grad_y is None else grad_y,
        grad_gamma,
        grad_beta,
        scale_gradient(total, scale, smallest, levels),
    )


@operator(_codes_like)
def add_quantize(
    a: Tensor, b: Tensor, a_numbers: Tensor, b_numbers: Tensor, floor: float, ceiling: float, scale: Tensor,
    smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, floor, ceiling), both codes themselves, of the same strides."""
    grid = grid_in_force(scale, smallest, zero_point, Levels(low, high, shift, factor, relative))
    operands = Operand(a, *step_and_zero(a_numbers)), Operand(b, *step_and_zero(b_numbers))
    codes, bad = chains.add_quantize(*operands, ClippedGrid(grid, floor, ceiling))
    return codes, numbers_of(grid, bad)


@operator(lambda grad, a, b, a_numbers, b_numbers, floor, ceiling, scale, *rest: (
    torch.empty_like(a, dtype=grad.dtype), torch.empty_like(scale)
))  # fmt: skip
def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_numbers: Tensor, b_numbers: Tensor, floor: float, ceiling: float,
    scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float,
    relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, which is that of both operands, and of scale."""
    levels = Levels(low, high, shift, factor, relative)
    clipped = ClippedGrid(grid_in_force(scale, smallest, zero_point, levels), floor, ceiling)
    operands = Operand(a, *step_and_zero(a_numbers)), Operand(b, *step_and_zero(b_numbers))
    grad_sum, total = chains.add_quantize_backward(like(grad, a), *operands, clipped)
    return grad_sum, scale_gradient(total, scale, smallest, levels)
