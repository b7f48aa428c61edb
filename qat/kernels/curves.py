"""Operators that quantize what an activation function or softmax makes of a tensor, in one pass."""

import torch
from torch import Tensor

from qat.kernels.cpu import compiled, like, threads_for
from qat.kernels.formulas import curves as formulas
from qat.kernels.learned import learned_grid
from qat.kernels.operator import operator

CURVES = ("gelu", "gelu_tanh", "silu", "hardswish")
"""In the order of the kernels' own numbers."""


@operator(lambda x, *rest: (torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)), formulas.curve_quantize)
def curve_quantize(
    x: Tensor, curve: str, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int,
    factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of curve(x), one of `CURVES`; x: dense. As of `qat.kernels.quantizers`."""
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    codes, numbers = torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)
    compiled().curve_quantize(
        x.data_ptr(), codes.data_ptr(), x.numel(), grid, CURVES.index(curve), numbers.data_ptr(),
        threads_for(x.numel()),
    )  # fmt: skip
    return codes, numbers


@operator(
    lambda grad, x, curve, scale, *rest: (torch.empty_like(x), torch.empty_like(scale)),
    formulas.curve_quantize_backward,
)
def curve_quantize_backward(
    grad: Tensor, x: Tensor, curve: str, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int,
    high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and scale."""
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    grad, grad_x, grad_scale = like(grad, x), torch.empty_like(x), torch.empty_like(scale)
    compiled().curve_quantize_backward(
        grad.data_ptr(), x.data_ptr(), grad_x.data_ptr(), x.numel(), grid, CURVES.index(curve), grad_scale.data_ptr(),
        threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, grad_scale


@operator(
    lambda x, *rest: (torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)),
    formulas.softmax_quantize,
)
def softmax_quantize(
    x: Tensor, multiplier: float, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int,
    shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """softmax(x * multiplier, -1), its codes, and their numbers; x: contiguous."""
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    probabilities, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    numbers, columns = x.new_empty(2), x.shape[-1]
    compiled().softmax_quantize(
        x.data_ptr(), probabilities.data_ptr(), codes.data_ptr(), x.numel() // columns, columns, multiplier, grid,
        numbers.data_ptr(), threads_for(x.numel()),
    )  # fmt: skip
    return probabilities, codes, numbers


@operator(
    lambda grad, probabilities, multiplier, scale, *rest: (torch.empty_like(probabilities), torch.empty_like(scale)),
    formulas.softmax_quantize_backward,
)
def softmax_quantize_backward(
    grad: Tensor, probabilities: Tensor, multiplier: float, scale: Tensor, smallest: Tensor,
    zero_point: Tensor | None, low: int, high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and scale."""
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    grad, columns = like(grad, probabilities), probabilities.shape[-1]
    grad_x, grad_scale = torch.empty_like(probabilities), torch.empty_like(scale)
    compiled().softmax_quantize_backward(
        grad.data_ptr(), probabilities.data_ptr(), grad_x.data_ptr(), grad.numel() // columns, columns, multiplier,
        grid, grad_scale.data_ptr(), threads_for(grad.numel()),
    )  # fmt: skip
    return grad_x, grad_scale
