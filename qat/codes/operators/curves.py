"""Activation and quantizer, or softmax and quantizer, in one pass.

The function's float output is not stored, except for softmax, whose gradient needs the probabilities. The functions are
torch's own; C's are accurate to a few units in the last place, so a value next to a tie may round to the other level.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qat.codes.operators.codes import Codes, Context, PreQuantizer, first_derivative, outputs
from qat.codes.operators.grid import codes_of, grid_in_force, learned_by, learned_gradient, slopes_on
from qat.codes.operators.operator import operator
from qat.codes.operators.quantize import decode, holds_nan
from qat.codes.training.activations import PLAIN_CURVES
from qat.kernels.cpu.addresses import elements_at, is_dense, numbers_at
from qat.kernels.cpu.quantizers import Levels, compiled, empty_scale, in_layout_of, is_plain, learned_grid, threads_for
from qat.kernels.cpu.structures import GridTensors
from qat.quantizer import Quantizer


def gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x * Phi(x), and Phi(x) + x * phi(x)."""
    share = torch.special.erfc(x * -math.sqrt(0.5)) * 0.5  # erfc keeps its precision far below zero
    return x * share, share + x * (torch.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)))


def gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x * s, and s + x * s * (1 - s) * u'.

    s = sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3), since (1 + tanh(v)) / 2 = sigmoid(2 v). Beyond +-20 s is 0
    or 1, and x^3 could overflow.
    """
    near, twice = x.clamp(-20.0, 20.0), 2 * math.sqrt(2 / math.pi)
    square = near * near
    share = torch.sigmoid(twice * (near + 0.044715 * (near * square)))
    return x * share, share + x * share * (1 - share) * (twice * (1 + 3 * 0.044715 * square))


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x * s, and s + x * s * (1 - s), with s = sigmoid(x)."""
    share = torch.sigmoid(x)
    return x * share, share + x * share * (1 - share)


def hardswish(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x * clamp(x + 3, 0, 6) / 6, and its slope, x / 3 + 1/2 between -3 and 3."""
    rise = torch.where(x <= -3, 0.0, torch.where(x < 3, x * (1 / 3) + 0.5, 1.0))
    return x * (x + 3).clamp(0.0, 6.0) / 6, rise


CURVES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "hardswish": hardswish,
}  # fmt: skip
"""Functions by name: of a float32 tensor, to the activation's value and its slope."""


def _curve_quantize(x: Tensor, curve: str, grid: GridTensors, levels: list[float]) -> tuple[Tensor, Tensor]:
    value, _ = CURVES[curve](x)
    return codes_of(value, grid_in_force(grid, levels), x)


def _curve_quantize_backward(
    grad: Tensor, x: Tensor, curve: str, grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor]:
    """dx = grad * curve'(x) inside the grid;  dscale = factor * sum(grad * slope)."""
    value, rise = CURVES[curve](x)
    inside, slope = slopes_on(value, grid_in_force(grid, levels))
    grad_x = in_layout_of(torch.where(inside, grad * rise, 0.0), x)
    return grad_x, learned_gradient((grad * slope).sum(), grid, levels)


def _softmax_quantize(
    x: Tensor, multiplier: float, grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = torch.softmax(x * multiplier, -1)
    codes, qparams = codes_of(probabilities, grid_in_force(grid, levels), x)
    return probabilities, codes, qparams


def _softmax_quantize_backward(
    grad: Tensor, probabilities: Tensor, multiplier: float, grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor]:
    """With passed = grad inside the grid and 0 elsewhere, and p the probabilities:

    dx = multiplier * p * (passed - sum(passed * p));  dscale = factor * sum(grad * slope)
    """
    p = probabilities
    inside, slope = slopes_on(p, grid_in_force(grid, levels))
    passed = torch.where(inside, grad, 0.0)
    grad_x = (passed - (passed * p).sum(-1, keepdim=True)) * p * multiplier
    return grad_x, learned_gradient((grad * slope).sum(), grid, levels)


CURVE_NUMBERS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "hardswish": 3}
"""Numbers of the curves in curves.c."""


@operator(_curve_quantize)
def curve_quantize(x: Tensor, curve: str, grid: GridTensors, levels: list[float]) -> tuple[Tensor, Tensor]:
    """Return codes of curve(x) and qparams, for a dense x and one of `CURVE_NUMBERS`."""
    codes, qparams = torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)
    compiled().curve_quantize(
        elements_at("x", x, x), elements_at("codes", codes, x, torch.uint8), x.numel(), learned_grid(grid, levels),
        CURVE_NUMBERS[curve], numbers_at("step and zero", qparams, 2), threads_for(x.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(_curve_quantize_backward)
def curve_quantize_backward(
    grad: Tensor, x: Tensor, curve: str, grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and scale."""
    grad, grad_x, grad_scale = in_layout_of(grad, x), torch.empty_like(x), empty_scale(grid)
    compiled().curve_quantize_backward(
        elements_at("grad", grad, x), elements_at("x", x, x), elements_at("grad_x", grad_x, x), x.numel(),
        learned_grid(grid, levels), CURVE_NUMBERS[curve], numbers_at("grad_scale", grad_scale, 1),
        threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, grad_scale


@operator(_softmax_quantize)
def softmax_quantize(
    x: Tensor, multiplier: float, grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax(x * multiplier, -1) of a contiguous x, its codes and qparams."""
    probabilities, codes = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    qparams, columns, count = x.new_empty(2), x.shape[-1], x.numel()
    compiled().softmax_quantize(
        numbers_at("x", x, count), numbers_at("probabilities", probabilities, count),
        numbers_at("codes", codes, count, torch.uint8), count // columns, columns, multiplier,
        learned_grid(grid, levels), numbers_at("step and zero", qparams, 2), threads_for(count),
    )  # fmt: skip
    return probabilities, codes, qparams


@operator(_softmax_quantize_backward)
def softmax_quantize_backward(
    grad: Tensor, probabilities: Tensor, multiplier: float, grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and scale."""
    grad, columns, count = in_layout_of(grad, probabilities), probabilities.shape[-1], probabilities.numel()
    grad_x, grad_scale = torch.empty_like(probabilities), empty_scale(grid)
    compiled().softmax_quantize_backward(
        numbers_at("grad", grad, count), numbers_at("probabilities", probabilities, count),
        numbers_at("grad_x", grad_x, count), count // columns, columns, multiplier, learned_grid(grid, levels),
        numbers_at("grad_scale", grad_scale, 1), threads_for(count),
    )  # fmt: skip
    return grad_x, grad_scale


class QuantizeCurveFunction(torch.autograd.Function):
    """codes = clamp(round(curve(x) / step) + zero, low, high)."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels, curve: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        codes, qparams = curve_quantize(x, curve, [scale, smallest, zero_point], levels)
        ctx.save_for_backward(x, scale, smallest, zero_point)
        ctx.levels, ctx.curve = levels, curve
        return outputs(ctx, codes, qparams, x)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *grid = ctx.saved_tensors
        grad_x, grad_scale = curve_quantize_backward(grad, x, ctx.curve, grid, ctx.levels)
        return grad_x, grad_scale, None, None, None, None


class QuantizeSoftmaxFunction(torch.autograd.Function):
    """codes of p = softmax(x * multiplier) over the last axis."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels,
        multiplier: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        # The probabilities are saved, and the scores are not.
        probabilities, codes, qparams = softmax_quantize(x, multiplier, [scale, smallest, zero_point], levels)
        ctx.save_for_backward(probabilities, scale, smallest, zero_point)
        ctx.levels, ctx.multiplier = levels, multiplier
        return outputs(ctx, codes, qparams, x)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, *grid = ctx.saved_tensors
        grad_x, grad_scale = softmax_quantize_backward(grad, probabilities, ctx.multiplier, grid, ctx.levels)
        return grad_x, grad_scale, None, None, None, None


def quantize_curve(
    x: Codes | Tensor, quantizer: Quantizer, curve: str, activation: nn.Module | None = None
) -> Codes | Tensor:
    """Return quantizer(curve(x)), as codes where kernels apply."""
    x = decode(x)
    learned = learned_by(quantizer, x) if is_plain(x) and x.numel() and is_dense(x) else None
    if learned is not None:
        codes = Codes(*QuantizeCurveFunction.apply(x, *learned, curve))
        if not holds_nan(codes):
            return codes
    y: Tensor = quantizer(before_curve(x, quantizer, curve, activation).z)
    return y


def before_curve(x: Tensor, quantizer: Quantizer, curve: str, activation: nn.Module | None = None) -> PreQuantizer:
    """Return curve(x)."""
    y = PLAIN_CURVES[curve](x) if activation is None else activation(x)
    return PreQuantizer(y, y)


def quantize_softmax(
    x: Codes | Tensor, quantizer: Quantizer, axis: int, multiplier: float = 1.0,
    softmax: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """Return quantizer(softmax(x * multiplier)), as codes where kernels apply."""
    x = decode(x)
    last = axis in (-1, x.dim() - 1)
    learned = learned_by(quantizer, x) if last and is_plain(x) and x.numel() and x.is_contiguous() else None
    if learned is not None:
        codes = Codes(*QuantizeSoftmaxFunction.apply(x, *learned, multiplier))
        if not holds_nan(codes):
            return codes
    y: Tensor = quantizer(before_softmax(x, quantizer, axis, multiplier, softmax).z)
    return y


def before_softmax(
    x: Tensor, quantizer: Quantizer, axis: int, multiplier: float = 1.0, softmax: nn.Module | None = None
) -> PreQuantizer:
    """Return softmax(x * multiplier)."""
    scores = x if multiplier == 1 else x * multiplier
    y = torch.softmax(scores, axis) if softmax is None else softmax(scores)
    return PreQuantizer(y, y)
