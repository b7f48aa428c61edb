"""Sum of two quantized tensors, clip and quantizer in one pass."""

import math

import torch
from torch import Tensor, nn

from qat.codes.operators.codes import Codes, Context, PreQuantizer, first_derivative, outputs
from qat.codes.operators.grid import clipped_slopes, codes_of, grid_in_force, learned_by, learned_gradient
from qat.codes.operators.norm import before_chain
from qat.codes.operators.operator import operator
from qat.codes.operators.quantize import _dequantize, decode, holds_nan, with_scale_gradient
from qat.codes.operators.values import sum_values
from qat.kernels import passes_values
from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import Levels, compiled, empty_scale, in_layout_of, learned_grid, threads_for
from qat.kernels.cpu.structures import GridTensors, Operand
from qat.quantizer import Quantizer


def _add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: GridTensors,
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    z = _dequantize(a, a_qparams).add_(_dequantize(b, b_qparams)).clamp_(*clip)
    return codes_of(z, grid_in_force(grid, levels), a)


def _add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: GridTensors,
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    z = _dequantize(a, a_qparams).add_(_dequantize(b, b_qparams))
    passes, slope = clipped_slopes(z, clip, grid_in_force(grid, levels))
    total = (grad * slope).sum()
    grad_sum = in_layout_of(torch.where(passes, grad, 0), a)
    return grad_sum, learned_gradient(total, grid, levels)


def _operand(codes: Tensor, qparams: Tensor, pattern: Tensor) -> Operand:
    return Operand(
        elements_at("an operand's codes", codes, pattern, torch.uint8), numbers_at("step and zero", qparams, 2)
    )


@operator(_add_quantize)
def add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: GridTensors,
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return codes of clamp(a + b, *clip) and qparams; a and b have the same strides."""
    codes, qparams = torch.empty_like(a), torch.empty(2, dtype=torch.float32)
    compiled().add_quantize(
        _operand(a, a_qparams, a), _operand(b, b_qparams, a), elements_at("codes", codes, a, torch.uint8), a.numel(),
        learned_grid(grid, levels), *clip, numbers_at("step and zero", qparams, 2), threads_for(a.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(_add_quantize_backward)
def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float],
    grid: GridTensors, levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of the sum, which is that of both operands, and of scale."""
    grad = in_layout_of(grad, a)  # C goes through all tensors in one order
    grad_sum, grad_scale = torch.empty_like(grad), empty_scale(grid)
    compiled().add_quantize_backward(
        elements_at("grad", grad, a), _operand(a, a_qparams, a), _operand(b, b_qparams, a),
        elements_at("grad_sum", grad_sum, a), a.numel(), learned_grid(grid, levels), *clip,
        numbers_at("grad_scale", grad_scale, 1), threads_for(a.numel()),
    )  # fmt: skip
    return grad_sum, grad_scale


class AddQuantizeFunction(torch.autograd.Function):
    """Sum of two quantized tensors -> clip -> quantizer, all of them codes."""

    @staticmethod
    def forward(
        ctx: Context, a_carrier: Tensor, b_carrier: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor,
        scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels, bounds: tuple[float, float],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        codes, qparams = add_quantize(a, b, a_qparams, b_qparams, bounds, [scale, smallest, zero_point], levels)
        # Codes are a quarter of the floats, and other readers keep those of both operands anyway.
        ctx.save_for_backward(a, b, a_qparams, b_qparams, scale, smallest, zero_point)
        ctx.levels, ctx.bounds = levels, bounds
        return outputs(ctx, codes, qparams, a_carrier)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_sum, grad_scale = add_quantize_backward(grad, *saved[:4], ctx.bounds, list(saved[4:]), ctx.levels)
        return grad_sum, grad_sum, None, None, None, None, grad_scale, None, None, None, None


def quantize_sum(
    a: Codes | Tensor, b: Codes | Tensor, quantizer: Quantizer, floor: float = -math.inf, ceiling: float = math.inf,
    activation: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """Return quantizer(clip(a + b)), as `quantize_chain` does."""
    if (
        isinstance(a, Codes) and isinstance(b, Codes) and a.shape == b.shape and a.codes.stride() == b.codes.stride()
        and not (torch.compiler.is_compiling() and a.codes is b.codes)  # torch.compile takes no tensor twice
        and (learned := learned_by(quantizer, a.codes)) is not None
    ):  # fmt: skip
        a, b = with_scale_gradient(a), with_scale_gradient(b)
        codes = Codes(
            *AddQuantizeFunction.apply(
                a.carrier, b.carrier, a.codes, b.codes, a.qparams, b.qparams, *learned, (floor, ceiling)
            )
        )
        if not holds_nan(codes):
            return codes
    a, b = decode(a), decode(b)
    if passes_values(a) and (found := sum_values(a, b, quantizer, floor, ceiling)) is not None:
        return found
    z: Tensor = quantizer(before_sum(a, b, quantizer, floor, ceiling, activation).z)
    return z


def before_sum(
    a: Tensor, b: Tensor, quantizer: Quantizer, floor: float = -math.inf, ceiling: float = math.inf,
    activation: nn.Module | None = None,
) -> PreQuantizer:  # fmt: skip
    """Return clip(a + b)."""
    return before_chain(a + b, quantizer, None, floor, ceiling, activation)
