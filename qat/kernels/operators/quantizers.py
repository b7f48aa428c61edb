"""Operators that quantize a tensor, or the sum of two quantized tensors.

All take a quantizer's tensors (scale, smallest, zero_point) and the fields of its `Levels`. They return codes and
`qparams`, a tensor of the codes' step and zero. A gradient that is not needed comes back empty.
"""

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import compiled, learned_grid, like, threads_for
from qat.kernels.cpu.structures import Operand
from qat.kernels.formulas import quantizers as formulas
from qat.kernels.operators.operator import operator


def _codes_like(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.uint8), torch.empty(2, dtype=torch.float32)


def _operand(codes: Tensor, qparams: Tensor, pattern: Tensor) -> Operand:
    return Operand(
        elements_at("an operand's codes", codes, pattern, torch.uint8), numbers_at("step and zero", qparams, 2)
    )


@operator(_codes_like, formulas.quantize_codes)
def quantize_codes(
    x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int,
    factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """codes = clamp(round(x / step) + zero_point, low, high) + shift."""
    codes, qparams = _codes_like(x)
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    compiled().quantize_codes(
        elements_at("x", x, x), elements_at("codes", codes, x, torch.uint8), x.numel(), grid,
        numbers_at("step and zero", qparams, 2), threads_for(x.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(
    lambda grad, x, scale, smallest, zero_point, low, high, shift, factor, relative, needs_x: (
        torch.empty_like(x) if needs_x else x.new_empty(0), torch.empty_like(scale)
    ),
    formulas.quantize_codes_backward,
)  # fmt: skip
def quantize_codes_backward(
    grad: Tensor, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int,
    shift: int, factor: float, relative: bool, needs_x: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and scale."""
    grad, grad_x = like(grad, x), torch.empty_like(x) if needs_x else x.new_empty(0)
    grad_scale = torch.empty_like(scale)
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    compiled().quantize_codes_backward(
        elements_at("grad", grad, x), elements_at("x", x, x), elements_at("grad_x", grad_x, x) if needs_x else None,
        x.numel(), grid, numbers_at("grad_scale", grad_scale, 1), threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, grad_scale


@operator(_codes_like, formulas.add_quantize)
def add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, floor: float, ceiling: float, scale: Tensor,
    smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float, relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, floor, ceiling), where a and b are codes with the same strides."""
    codes, qparams = _codes_like(a)
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    compiled().add_quantize(
        _operand(a, a_qparams, a), _operand(b, b_qparams, a), elements_at("codes", codes, a, torch.uint8), a.numel(),
        grid, floor, ceiling, numbers_at("step and zero", qparams, 2), threads_for(a.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(lambda grad, a, b, a_qparams, b_qparams, floor, ceiling, scale, *rest: (
    torch.empty_like(a, dtype=grad.dtype), torch.empty_like(scale)
), formulas.add_quantize_backward)  # fmt: skip
def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, floor: float, ceiling: float,
    scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float,
    relative: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, which is the gradient of both operands, and that of scale."""
    grad = like(grad, a)
    grad_sum, grad_scale = torch.empty_like(grad), torch.empty_like(scale)
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    compiled().add_quantize_backward(
        elements_at("grad", grad, a), _operand(a, a_qparams, a), _operand(b, b_qparams, a),
        elements_at("grad_sum", grad_sum, a), a.numel(), grid, floor, ceiling,
        numbers_at("grad_scale", grad_scale, 1), threads_for(a.numel()),
    )  # fmt: skip
    return grad_sum, grad_scale
