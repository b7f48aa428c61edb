"""Operators that quantize what an activation function or softmax makes of a tensor, in one pass."""

import ctypes

import torch
from torch import Tensor

from qat.kernels.cpu import address, compiled, like, threads_for
from qat.kernels.learned import Levels, grid_in_force, numbers_of, scale_gradient
from qat.kernels.operator import operator

CURVES = ("gelu", "gelu_tanh", "silu", "hardswish")
"""In the order of the kernels' own numbers."""


@operator(lambda x, *rest: (torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)))
def curve_quantize(
    x: Tensor, curve: str, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int,
    factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of curve(x), one of `CURVES`; x: dense. As of `qat.kernels.operators`."""
    grid = grid_in_force(scale, smallest, zero_point, Levels(low, high, shift, factor, relative))
    codes = torch.empty_like(x, dtype=torch.uint8)
    bad = compiled().curve_quantize(
        address(x), address(codes), ctypes.c_int64(x.numel()), grid, CURVES.index(curve), threads_for(x.numel())
    )
    return codes, numbers_of(grid, bool(bad))


@operator(lambda grad, x, curve, scale, *rest: (torch.empty_like(x), torch.empty_like(scale)))
def curve_quantize_backward(
    grad: Tensor, x: Tensor, curve: str, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int,
    high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and scale."""
    levels = Levels(low, high, shift, factor, relative)
    grad, grad_x = like(grad, x), torch.empty_like(x)
    function = compiled().curve_quantize_backward
    function.restype = ctypes.c_double
    total = function(
        address(grad), address(x), address(grad_x), ctypes.c_int64(x.numel()),
        grid_in_force(scale, smallest, zero_point, levels), CURVES.index(curve), threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, scale_gradient(total, scale, smallest, levels)


@operator(
    lambda x, *rest: (torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8), x.new_empty(2))
)  # fmt: skip
def softmax_quantize(
    x: Tensor, multiplier: float, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int,
    shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """softmax(x * multiplier, -1), its codes, and their numbers; x: contiguous."""
    grid = grid_in_force(scale, smallest, zero_point, Levels(low, high, shift, factor, relative))
    probabilities, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    columns = x.shape[-1]
    bad = compiled().softmax_quantize(
        address(x), address(probabilities), address(codes), ctypes.c_int64(x.numel() // columns),
        ctypes.c_int64(columns), ctypes.c_float(multiplier), grid, threads_for(x.numel()),
    )  # fmt: skip
    return probabilities, codes, numbers_of(grid, bool(bad))


@operator(lambda grad, probabilities, multiplier, scale, *rest: (torch.empty_like(grad), torch.empty_like(scale)))
def softmax_quantize_backward(
    grad: Tensor, probabilities: Tensor, multiplier: float, scale: Tensor, smallest: Tensor,
    zero_point: Tensor | None, low: int, high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and scale."""
    levels = Levels(low, high, shift, factor, relative)
    grad, grad_x, columns = like(grad, probabilities), torch.empty_like(probabilities), probabilities.shape[-1]
    function = compiled().softmax_quantize_backward
    function.restype = ctypes.c_double
    total = function(
        address(grad), address(probabilities), address(grad_x), ctypes.c_int64(grad.numel() // columns),
        ctypes.c_int64(columns), ctypes.c_float(multiplier), grid_in_force(scale, smallest, zero_point, levels),
        threads_for(grad.numel()),
    )  # fmt: skip
    return grad_x, scale_gradient(total, scale, smallest, levels)
