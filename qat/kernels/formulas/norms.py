"""Formulas for a BatchNorm, a clamp and the quantizer behind them; see `qat.kernels.operators.norms`.

    z = y * alpha + offset, with alpha = gamma * inverse and offset = beta - mean * alpha

Channels are axis 1, or the last axis of tensors with fewer than four. Statistics are float32 for every dtype of y.
"""

from typing import Any

import torch
from torch import Tensor

from qat.kernels.formulas.grids import clipped_slopes, codes_of, grid_of, in_layout_of, learned_gradient


def batch_statistics(y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of every channel, 1 / sqrt(variance + eps), and the unbiased variance (0 for a single value)."""
    axes = _others(y)
    variance, mean = torch.var_mean(y.to(torch.float32), axes, correction=0)
    count = y.numel() // mean.numel()
    return mean, torch.rsqrt(variance + eps), variance * (count / max(count - 1, 1))


def norm_quantize(
    y: Tensor, norm: list[Tensor], clip: list[float], grid: list[Any], levels: list[float]
) -> tuple[Tensor, Tensor]:
    """Codes of clamp((y - mean) * inverse * gamma + beta, *clip); norm holds gamma, beta, mean and inverse.

    C rounds y * alpha + offset once, torch on the CPU twice: a value next to a tie may round to the other level.
    """
    alpha, offset = _linear_form(y, *norm)
    z = torch.addcmul(offset, y.to(torch.float32), alpha).clamp_(*clip)
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
    axes, wide, full = _others(y), y.to(torch.float32), grad.to(torch.float32)
    gamma, beta, mean, inverse = norm
    alpha, offset = _linear_form(y, *norm)
    passes, slope = clipped_slopes(torch.addcmul(offset, wide, alpha), clip, grid_of(grid, levels))
    total = (full * slope).sum()
    masked = torch.where(passes, full, 0.0)
    centred = wide - _along(mean, y)
    sums, products = masked.sum(axes), (masked * centred).sum(axes)
    spread = inverse.to(torch.float32)
    grad_y = y.new_empty(0)
    if needs_y:
        if follows_batch:
            count = y.numel() // sums.numel()
            masked = masked - _along(sums / count, y)
            masked = torch.addcmul(masked, centred, _along(products * (spread * spread / count), y), value=-1)
        grad_y = in_layout_of(masked * alpha, y, y.dtype)
    grad_gamma, grad_beta = (products * spread).to(gamma.dtype), sums.to(beta.dtype)
    return grad_y, grad_gamma, grad_beta, learned_gradient(total, grid, levels)


def _others(y: Tensor) -> list[int]:
    """All axes but that of the channels."""
    return [0, *range(2, y.dim())] if y.dim() > 3 else list(range(y.dim() - 1))


def _along(values: Tensor, y: Tensor) -> Tensor:
    """One value per channel, in float32, shaped to broadcast with y."""
    wide = values.to(torch.float32)
    return wide.reshape(-1, *[1] * (y.dim() - 2)) if y.dim() > 3 else wide


def _linear_form(y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and offset, shaped to broadcast with y."""
    alpha = inverse.to(torch.float32) * gamma.to(torch.float32)
    return _along(alpha, y), _along(beta.to(torch.float32) - mean.to(torch.float32) * alpha, y)
