"""Operators that apply an activation function or softmax and quantize the result, in one pass."""

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import compiled, empty_scale, in_layout_of, learned_grid, threads_for
from qat.kernels.formulas import curves as formulas
from qat.kernels.operators.operator import operator

CURVE_NUMBERS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "hardswish": 3}
"""What curves.c calls the curves."""


@operator(formulas.curve_quantize)
def curve_quantize(x: Tensor, curve: str, grid: list[Tensor | None], levels: list[float]) -> tuple[Tensor, Tensor]:
    """Codes of curve(x), for a dense x, and their qparams; curve is one of `CURVE_NUMBERS`."""
    codes, qparams = torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)
    compiled().curve_quantize(
        elements_at("x", x, x), elements_at("codes", codes, x, torch.uint8), x.numel(), learned_grid(grid, levels),
        CURVE_NUMBERS[curve], numbers_at("step and zero", qparams, 2), threads_for(x.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(formulas.curve_quantize_backward)
def curve_quantize_backward(
    grad: Tensor, x: Tensor, curve: str, grid: list[Tensor | None], levels: list[float]
) -> tuple[Tensor, Tensor]:
    """The gradients of x and scale."""
    grad, grad_x, grad_scale = in_layout_of(grad, x), torch.empty_like(x), empty_scale(grid)
    compiled().curve_quantize_backward(
        elements_at("grad", grad, x), elements_at("x", x, x), elements_at("grad_x", grad_x, x), x.numel(),
        learned_grid(grid, levels), CURVE_NUMBERS[curve], numbers_at("grad_scale", grad_scale, 1),
        threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, grad_scale


@operator(formulas.softmax_quantize)
def softmax_quantize(
    x: Tensor, multiplier: float, grid: list[Tensor | None], levels: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(x * multiplier, -1), its codes, and their qparams; x is contiguous."""
    probabilities, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    qparams, columns, count = x.new_empty(2), x.shape[-1], x.numel()
    compiled().softmax_quantize(
        numbers_at("x", x, count), numbers_at("probabilities", probabilities, count),
        numbers_at("codes", codes, count, torch.uint8), count // columns, columns, multiplier,
        learned_grid(grid, levels), numbers_at("step and zero", qparams, 2), threads_for(count),
    )  # fmt: skip
    return probabilities, codes, qparams


@operator(formulas.softmax_quantize_backward)
def softmax_quantize_backward(
    grad: Tensor, probabilities: Tensor, multiplier: float, grid: list[Tensor | None], levels: list[float]
) -> tuple[Tensor, Tensor]:
    """The gradients of x and scale."""
    grad, columns, count = in_layout_of(grad, probabilities), probabilities.shape[-1], probabilities.numel()
    grad_x, grad_scale = torch.empty_like(probabilities), empty_scale(grid)
    compiled().softmax_quantize_backward(
        numbers_at("grad", grad, count), numbers_at("probabilities", probabilities, count),
        numbers_at("grad_x", grad_x, count), count // columns, columns, multiplier, learned_grid(grid, levels),
        numbers_at("grad_scale", grad_scale, 1), threads_for(count),
    )  # fmt: skip
    return grad_x, grad_scale
