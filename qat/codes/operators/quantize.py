"""A quantizer alone, from floats to codes and back; and moves of codes."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from qat.codes.operators.codes import Codes, Context, UnquantizedInput, carrier_for, first_derivative, outputs
from qat.codes.operators.grid import Learned, codes_of, grid_in_force, learned_by, learned_gradient, slopes_on
from qat.codes.operators.operator import operator
from qat.kernels.cpu.addresses import elements_at, is_dense, numbers_at
from qat.kernels.cpu.quantizers import (
    Levels,
    compiled,
    dequantize,
    empty_scale,
    in_layout_of,
    is_plain,
    learned_grid,
    threads_for,
)
from qat.kernels.cpu.structures import GridTensors
from qat.quantizer import Quantizer


def _quantize_codes(x: Tensor, grid: GridTensors, levels: list[float]) -> tuple[Tensor, Tensor]:
    return codes_of(x, grid_in_force(grid, levels), torch.empty_like(x, memory_format=_layout(x)))


def _quantize_codes_backward(
    grad: Tensor, x: Tensor, grid: GridTensors, levels: list[float], needs_x: bool
) -> tuple[Tensor, Tensor]:
    """dx = grad inside;  dscale = factor * sum(grad * slope)."""
    inside, slope = slopes_on(x, grid_in_force(grid, levels))
    total = (grad * slope).sum()
    grad_x = in_layout_of(torch.where(inside, grad, 0), x) if needs_x else x.new_empty(0)
    return grad_x, learned_gradient(total, grid, levels)


def _dequantize(codes: Tensor, qparams: Tensor) -> Tensor:
    # Not in place: an in-place last operation costs a Function its gradient.
    return (codes.to(torch.float32) - qparams[1]) * qparams[0]


def _layout(x: Tensor) -> torch.memory_format:
    # As `CPUKernels.quantize`: of an image of one pixel, which has two layouts, a product takes the same one.
    return torch.contiguous_format if x.is_contiguous() else torch.preserve_format


@operator(_quantize_codes)
def quantize_codes(x: Tensor, grid: GridTensors, levels: list[float]) -> tuple[Tensor, Tensor]:
    """Return clamp(round(x / step) + zero_point, low, high) + shift, and its qparams."""
    codes = torch.empty_like(x, dtype=torch.uint8, memory_format=_layout(x))
    qparams = torch.empty(2, dtype=torch.float32)
    compiled().quantize_codes(
        elements_at("x", x, x), elements_at("codes", codes, x, torch.uint8), x.numel(), learned_grid(grid, levels),
        numbers_at("step and zero", qparams, 2), threads_for(x.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(_quantize_codes_backward)
def quantize_codes_backward(
    grad: Tensor, x: Tensor, grid: GridTensors, levels: list[float], needs_x: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and scale."""
    grad, grad_x = in_layout_of(grad, x), torch.empty_like(x) if needs_x else x.new_empty(0)
    grad_scale = empty_scale(grid)
    compiled().quantize_codes_backward(
        elements_at("grad", grad, x), elements_at("x", x, x), elements_at("grad_x", grad_x, x) if needs_x else None,
        x.numel(), learned_grid(grid, levels), numbers_at("grad_scale", grad_scale, 1), threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, grad_scale


class QuantizeFunction(torch.autograd.Function):
    """A quantizer alone, as codes; the formulas are those of `LSQPlusFunction`."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The input is saved; the codes are kept by their readers.
        codes, qparams = quantize_codes(x, [scale, smallest, zero_point], levels)
        ctx.save_for_backward(x, scale, smallest, zero_point)
        ctx.levels = levels
        return outputs(ctx, codes, qparams, x)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x = ctx.needs_input_grad[0]
        x, *grid = ctx.saved_tensors
        grad_x, grad_scale = quantize_codes_backward(grad, x, grid, ctx.levels, needs_x)
        return grad_x if needs_x else None, grad_scale, None, None, None


class DecodeFunction(torch.autograd.Function):
    """y = (codes - zero) * step, with dy/dcarrier = 1; the quantizer has the step's."""

    @staticmethod
    def forward(ctx: Context, carrier: Tensor, codes: Tensor, qparams: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # which fuses it with the operations behind it
            return _dequantize(codes, qparams)
        return dequantize(codes, qparams)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class EncodeFunction(torch.autograd.Function):
    """codes = round(x / step) + zero of x on a grid already, with dcarrier/dx = 1."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels
    ) -> tuple[Tensor, Tensor, Tensor]:
        codes, qparams = quantize_codes(x, [scale, smallest, zero_point], levels)
        return outputs(ctx, codes, qparams, x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


def quantize(x: Tensor, learned: Learned) -> Codes:
    """Return the codes of a dense tensor that kernels take; see `holds_nan`."""
    if x.requires_grad or not learned.scale.requires_grad:
        return Codes(*QuantizeFunction.apply(x, *learned))
    codes, qparams = quantize_codes(x, [learned.scale.detach(), *learned[1:3]], learned.levels)
    return Codes(carrier_for(codes, x), codes, qparams, UnquantizedInput(x, learned))


def holds_nan(x: Codes) -> bool:
    """Return True if a value was NaN: no code stands for it, it has to stay in floats."""
    # Compiled code does not ask: there the whole tensor is NaN.
    return not torch.compiler.is_compiling() and math.isnan(x.qparams[0].item())


def with_scale_gradient(x: Codes) -> Codes:
    """Return codes whose carrier gives the scale its gradient."""
    return x if x.source is None else Codes(*QuantizeFunction.apply(x.source.x, *x.source.learned))


def decode(x: Codes | Tensor) -> Tensor:
    """Return the float tensor; a tensor is returned as it is."""
    if isinstance(x, Tensor):
        return x
    y: Tensor = DecodeFunction.apply(*with_scale_gradient(x)[:3])
    return y


def encode(x: Codes | Tensor, quantizer: Quantizer, *dropouts: Any) -> Codes | Tensor:
    """Return codes of a tensor on this grid, or the tensor where that cannot be."""
    if not isinstance(x, Tensor) or not (is_plain(x) and x.numel() and is_dense(x)):
        return x
    if any(dropout.training and dropout.p > 0 for dropout in dropouts):
        return x
    learned = learned_by(quantizer, x)
    if learned is None:
        return x
    codes = Codes(*EncodeFunction.apply(x, *learned))
    return x if holds_nan(codes) else codes


def reshape(x: Codes | Tensor, method: str, *args: object, **kwargs: object) -> Codes | Tensor:
    """Return x.method(*args, **kwargs) of a tensor or its codes, such as `flatten`."""
    return _moved(x, lambda tensor: getattr(tensor, method)(*args, **kwargs))


def reshape_by(x: Codes | Tensor, module: nn.Module) -> Codes | Tensor:
    """Return module(x) of a tensor or its codes, for `nn.Flatten` and the like."""
    return _moved(x, module)


def drop(x: Codes | Tensor, dropout: Any) -> Codes | Tensor:
    """Return x while nothing is dropped, else dropout(x), which lies on no grid."""
    if not (dropout.training and dropout.p > 0):
        return x
    return cast("Tensor", dropout(decode(x)))


def shape_of(x: Codes | Tensor) -> Tensor:
    """Return a float tensor of x's shape and device, whose values mean nothing."""
    return x if isinstance(x, Tensor) else x.carrier


def _moved(x: Codes | Tensor, operation: Callable[[Tensor], Tensor]) -> Codes | Tensor:
    if isinstance(x, Tensor):
        return operation(x)
    x = with_scale_gradient(x)
    return Codes(operation(x.carrier), operation(x.codes), x.qparams)
