"""Formulas that quantize a tensor, the sum of two quantized ones, or what a BatchNorm and a clamp make of one; see
`qat.kernels.operators.quantizers`.

    z = y * alpha + offset, with alpha = gamma * inverse and offset = beta - mean * alpha, for a BatchNorm

Channels are axis 1, or the last axis of tensors with fewer than four.
"""

from typing import Any

import torch
from torch import Tensor

from qat.kernels.cpu.quantizers import in_layout_of
from qat.kernels.formulas.grids import clipped_slopes, codes_of, grid_of, learned_gradient, slopes_on


def quantize_codes(x: Tensor, grid: list[Any], levels: list[float]) -> tuple[Tensor, Tensor]:
    """codes = clamp(round(x / step) + zero_point, low, high) + shift."""
    return codes_of(x, grid_of(grid, levels), x)


def quantize_codes_backward(
    grad: Tensor, x: Tensor, grid: list[Any], levels: list[float], needs_x: bool
) -> tuple[Tensor, Tensor]:
    """dx = grad inside;  dscale = factor * sum(grad * slope)."""
    inside, slope = slopes_on(x, grid_of(grid, levels))
    total = (grad * slope).sum()
    grad_x = in_layout_of(torch.where(inside, grad, 0), x) if needs_x else x.new_empty(0)
    return grad_x, learned_gradient(total, grid, levels)


def add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: list[Any],
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, *clip), where a and b are codes with the same strides."""
    z = dequantize(a, a_qparams).add_(dequantize(b, b_qparams)).clamp_(*clip)
    return codes_of(z, grid_of(grid, levels), a)


def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: list[Any],
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, grad inside the grid and strictly inside the clip, and factor * sum(grad * slope)."""
    z = dequantize(a, a_qparams).add_(dequantize(b, b_qparams))
    passes, slope = clipped_slopes(z, clip, grid_of(grid, levels))
    total = (grad * slope).sum()
    grad_sum = in_layout_of(torch.where(passes, grad, 0), a)
    return grad_sum, learned_gradient(total, grid, levels)


def dequantize(codes: Tensor, qparams: Tensor) -> Tensor:
    """(codes - zero) * step in float32; not in place: an in-place last operation costs a Function its gradient."""
    return (codes.to(torch.float32) - qparams[1]) * qparams[0]


def batch_statistics(y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of every channel, 1 / sqrt(variance + eps), and the unbiased variance (0 for a single value)."""
    axes = _others(y)
    variance, mean = torch.var_mean(y, axes, correction=0)
    count = y.numel() // mean.numel()
    return mean, torch.rsqrt(variance + eps), variance * (count / max(count - 1, 1))


def norm_quantize(
    y: Tensor, norm: list[Tensor], clip: list[float], grid: list[Any], levels: list[float]
) -> tuple[Tensor, Tensor]:
    """Codes of clamp((y - mean) * inverse * gamma + beta, *clip); norm holds gamma, beta, mean and inverse.

    C rounds y * alpha + offset once, torch on the CPU twice: a value next to a tie may round to the other level.
    """
    alpha, offset = _linear_form(y, *norm)
    z = torch.addcmul(offset, y, alpha).clamp_(*clip)
    return codes_of(z, grid_of(grid, levels), y)


def norm_quantize_backward(
    grad: Tensor, y: Tensor, norm: list[Tensor], clip: list[float], grid: list[Any], levels: list[float],
    follows_batch: bool, needs_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of y, gamma, beta and scale.

    masked is grad inside grid and clip, and 0 elsewhere:
        dbeta = sum(masked);  dgamma = inverse * sum(masked * (y - mean));  dscale = factor * sum(grad * slope)
        dy = alpha * masked;  if the statistics are the batch's:
        dy = alpha * (masked - mean(masked) - (y - mean) * mean(masked * (y - mean)) * inverse^2)
    """
    axes = _others(y)
    _, _, mean, inverse = norm
    alpha, offset = _linear_form(y, *norm)
    passes, slope = clipped_slopes(torch.addcmul(offset, y, alpha), clip, grid_of(grid, levels))
    total = (grad * slope).sum()
    masked = torch.where(passes, grad, 0.0)
    centred = y - _along(mean, y)
    sums, products = masked.sum(axes), (masked * centred).sum(axes)
    grad_y = y.new_empty(0)
    if needs_y:
        if follows_batch:
            count = y.numel() // sums.numel()
            masked = masked - _along(sums / count, y)
            masked = torch.addcmul(masked, centred, _along(products * (inverse * inverse / count), y), value=-1)
        grad_y = in_layout_of(masked * alpha, y)
    return grad_y, products * inverse, sums, learned_gradient(total, grid, levels)


def _others(y: Tensor) -> list[int]:
    """All axes but that of the channels."""
    return [0, *range(2, y.dim())] if y.dim() > 3 else list(range(y.dim() - 1))


def _along(values: Tensor, y: Tensor) -> Tensor:
    """One value per channel, shaped to broadcast with y."""
    return values.reshape(-1, *[1] * (y.dim() - 2)) if y.dim() > 3 else values


def _linear_form(y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and offset, shaped to broadcast with y."""
    alpha = inverse * gamma
    return _along(alpha, y), _along(beta - mean * alpha, y)
