"""Operators that quantize a tensor, or the sum of two quantized tensors; see `operator` for their arguments."""

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import compiled, empty_scale, in_layout_of, learned_grid, threads_for
from qat.kernels.cpu.structures import Operand
from qat.kernels.formulas import quantizers as formulas
from qat.kernels.operators.operator import operator


def _operand(codes: Tensor, qparams: Tensor, pattern: Tensor) -> Operand:
    return Operand(
        elements_at("an operand's codes", codes, pattern, torch.uint8), numbers_at("step and zero", qparams, 2)
    )


@operator(formulas.quantize_codes)
def quantize_codes(x: Tensor, grid: list[Tensor | None], levels: list[float]) -> tuple[Tensor, Tensor]:
    """codes = clamp(round(x / step) + zero_point, low, high) + shift, and their qparams."""
    codes, qparams = torch.empty_like(x, dtype=torch.uint8), torch.empty(2, dtype=torch.float32)
    compiled().quantize_codes(
        elements_at("x", x, x), elements_at("codes", codes, x, torch.uint8), x.numel(), learned_grid(grid, levels),
        numbers_at("step and zero", qparams, 2), threads_for(x.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(formulas.quantize_codes_backward)
def quantize_codes_backward(
    grad: Tensor, x: Tensor, grid: list[Tensor | None], levels: list[float], needs_x: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x and scale."""
    grad, grad_x = in_layout_of(grad, x), torch.empty_like(x) if needs_x else x.new_empty(0)
    grad_scale = empty_scale(grid)
    compiled().quantize_codes_backward(
        elements_at("grad", grad, x), elements_at("x", x, x), elements_at("grad_x", grad_x, x) if needs_x else None,
        x.numel(), learned_grid(grid, levels), numbers_at("grad_scale", grad_scale, 1), threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, grad_scale


@operator(formulas.add_quantize)
def add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: list[Tensor | None],
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, *clip), where a and b are codes with the same strides, and their qparams."""
    codes, qparams = torch.empty_like(a), torch.empty(2, dtype=torch.float32)
    compiled().add_quantize(
        _operand(a, a_qparams, a), _operand(b, b_qparams, a), elements_at("codes", codes, a, torch.uint8), a.numel(),
        learned_grid(grid, levels), *clip, numbers_at("step and zero", qparams, 2), threads_for(a.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(formulas.add_quantize_backward)
def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float],
    grid: list[Tensor | None], levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, which is the gradient of both operands, and that of scale."""
    grad = in_layout_of(grad, a)
    grad_sum, grad_scale = torch.empty_like(grad), empty_scale(grid)
    compiled().add_quantize_backward(
        elements_at("grad", grad, a), _operand(a, a_qparams, a), _operand(b, b_qparams, a),
        elements_at("grad_sum", grad_sum, a), a.numel(), learned_grid(grid, levels), *clip,
        numbers_at("grad_scale", grad_scale, 1), threads_for(a.numel()),
    )  # fmt: skip
    return grad_sum, grad_scale
