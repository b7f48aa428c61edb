"""Activation function and quantizer in one pass, and softmax and quantizer in one pass.

The function's float output is not stored, except for softmax, whose gradient needs the probabilities.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qat.fused.activations import PLAIN_CURVES
from qat.fused.functions.codes import Codes, PreQuantizer, decode, first_derivative, holds_nan, learned_by, outputs
from qat.kernels.cpu.addresses import is_dense
from qat.kernels.cpu.quantizers import Levels, is_plain
from qat.kernels.operators.curves import (
    curve_quantize,
    curve_quantize_backward,
    softmax_quantize,
    softmax_quantize_backward,
)
from qat.quantizer import Quantizer


class QuantizeCurveFunction(torch.autograd.Function):
    """codes = clamp(round(curve(x) / step) + zero, low, high); the backward computes the curve again from x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels, curve: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        codes, qparams = curve_quantize(x, curve, [scale, smallest, zero_point], levels)
        ctx.save_for_backward(x, scale, smallest, zero_point)
        ctx.levels, ctx.curve = levels, curve
        return outputs(ctx, codes, qparams, x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *grid = ctx.saved_tensors
        grad_x, grad_scale = curve_quantize_backward(grad, x, ctx.curve, grid, ctx.levels)
        return grad_x, grad_scale, *[None] * 4


class QuantizeSoftmaxFunction(torch.autograd.Function):
    """codes of p = softmax(x * multiplier) over the last axis.

    Backward, `passed` being the gradient behind the quantizer:
        dx = multiplier * p * (passed - sum(passed * p))
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels,
        multiplier: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        # The probabilities are saved, and the scores are not.
        probabilities, codes, qparams = softmax_quantize(x, multiplier, [scale, smallest, zero_point], levels)
        ctx.save_for_backward(probabilities, scale, smallest, zero_point)
        ctx.levels, ctx.multiplier = levels, multiplier
        return outputs(ctx, codes, qparams, x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, *grid = ctx.saved_tensors
        grad_x, grad_scale = softmax_quantize_backward(grad, probabilities, ctx.multiplier, grid, ctx.levels)
        return grad_x, grad_scale, *[None] * 4


def quantize_curve(
    x: Codes | Tensor, quantizer: Quantizer, curve: str, activation: nn.Module | None = None
) -> Codes | Tensor:
    """quantizer(curve(x)), as codes where kernels apply; the curve is one of `PLAIN_CURVES`."""
    x = decode(x)
    learned = learned_by(quantizer, x) if is_plain(x) and x.numel() and is_dense(x) else None
    if learned is not None:
        codes = Codes(*QuantizeCurveFunction.apply(x, *learned, curve))
        if not holds_nan(codes):
            return codes
    y: Tensor = quantizer(before_curve(x, quantizer, curve, activation).z)
    return y


def before_curve(x: Tensor, quantizer: Quantizer, curve: str, activation: Any = None) -> PreQuantizer:
    """curve(x)."""
    y = PLAIN_CURVES[curve](x) if activation is None else activation(x)
    return PreQuantizer(y, y)


def quantize_softmax(
    x: Codes | Tensor, quantizer: Quantizer, axis: int, multiplier: float = 1.0,
    softmax: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """quantizer(softmax(x * multiplier)), as codes where kernels apply; softmax is the layer, None for a function."""
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
    x: Tensor, quantizer: Quantizer, axis: int, multiplier: float = 1.0, softmax: Any = None
) -> PreQuantizer:
    """softmax(x * multiplier)."""
    scores = x if multiplier == 1 else x * multiplier
    y = torch.softmax(scores, axis) if softmax is None else softmax(scores)
    return PreQuantizer(y, y)
