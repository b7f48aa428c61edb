"""Operators that apply an activation function or softmax and quantize the result, in one pass."""

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import compiled, learned_grid, like, threads_for
from qat.kernels.formulas import curves as formulas
from qat.kernels.operators.operator import operator

CURVE_NUMBERS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "hardswish": 3}
"""What curves.c calls the curves."""


@operator(lambda x, *rest: (torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)), formulas.curve_quantize)
def curve_quantize(
    x: Tensor, curve: str, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int,
    factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of curve(x), for a dense x; curve is one of `CURVE_NUMBERS`, the rest as in `operators.quantizers`."""
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    codes, qparams = torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)
    compiled().curve_quantize(
        elements_at("x", x, x), elements_at("codes", codes, x, torch.uint8), x.numel(), grid, CURVE_NUMBERS[curve],
        numbers_at("step and zero", qparams, 2), threads_for(x.numel()),
    )  # fmt: skip
    return codes, qparams


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
        elements_at("grad", grad, x), elements_at("x", x, x), elements_at("grad_x", grad_x, x), x.numel(), grid,
        CURVE_NUMBERS[curve], numbers_at("grad_scale", grad_scale, 1), threads_for(x.numel()),
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
    """softmax(x * multiplier, -1), its codes, and their qparams; x is contiguous."""
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    probabilities, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    qparams, columns, count = x.new_empty(2), x.shape[-1], x.numel()
    compiled().softmax_quantize(
        numbers_at("x", x, count), numbers_at("probabilities", probabilities, count),
        numbers_at("codes", codes, count, torch.uint8), count // columns, columns, multiplier, grid,
        numbers_at("step and zero", qparams, 2), threads_for(count),
    )  # fmt: skip
    return probabilities, codes, qparams


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
    grad, columns, count = like(grad, probabilities), probabilities.shape[-1], probabilities.numel()
    grad_x, grad_scale = torch.empty_like(probabilities), torch.empty_like(scale)
    compiled().softmax_quantize_backward(
        numbers_at("grad", grad, count), numbers_at("probabilities", probabilities, count),
        numbers_at("grad_x", grad_x, count), count // columns, columns, multiplier, grid,
        numbers_at("grad_scale", grad_scale, 1), threads_for(count),
    )  # fmt: skip
    return grad_x, grad_scale
