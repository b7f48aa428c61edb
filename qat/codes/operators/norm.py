"""BatchNorm, clip and quantizer in one pass.

    z = y * alpha + offset, with alpha = gamma * inverse and offset = beta - mean * alpha, for a BatchNorm

Forward and backward read the layer's float output and recompute the rest. The normalised tensor, ReLU's output and the
quantized floats are never written, nor kept for backward. Channels are axis 1, or the last axis of tensors with fewer
than four.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.codes.operators.codes import Codes, Context, PreQuantizer, first_derivative, outputs
from qat.codes.operators.grid import clipped_slopes, codes_of, grid_in_force, learned_by, learned_gradient
from qat.codes.operators.operator import operator
from qat.codes.operators.quantize import decode, holds_nan, quantize
from qat.codes.operators.values import norm_values, sum_values
from qat.kernels import passes_values
from qat.kernels.cpu.addresses import elements_at, is_dense, numbers_at
from qat.kernels.cpu.quantizers import (
    NO_CLIP,
    Levels,
    compiled,
    empty_scale,
    in_layout_of,
    is_float32_on,
    is_plain,
    learned_grid,
    threads_for,
)
from qat.kernels.cpu.structures import Extent, GridTensors, Norm
from qat.quantizer import Quantizer
from qat.torch_internals import AnyBatchNorm


def _batch_statistics(y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    axes = _others(y)
    variance, mean = torch.var_mean(y, axes, correction=0)
    count = y.numel() // mean.numel()
    return mean, torch.rsqrt(variance + eps), variance * (count / max(count - 1, 1))


def _norm_quantize(
    y: Tensor, norm: list[Tensor], clip: list[float], grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor]:
    # C rounds y * alpha + offset once, torch on the CPU twice: a value next to a tie may round to the other level.
    alpha, offset = _linear_form(y, *norm)
    z = torch.addcmul(offset, y, alpha).clamp_(*clip)
    return codes_of(z, grid_in_force(grid, levels), y)


def _norm_quantize_backward(
    grad: Tensor, y: Tensor, norm: list[Tensor], clip: list[float], grid: GridTensors, levels: list[float],
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
    passes, slope = clipped_slopes(torch.addcmul(offset, y, alpha), clip, grid_in_force(grid, levels))
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
    return [0, *range(2, y.dim())] if y.dim() > 3 else list(range(y.dim() - 1))


def _along(values: Tensor, y: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (y.dim() - 2)) if y.dim() > 3 else values


def _linear_form(y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    alpha = inverse * gamma
    return _along(alpha, y), _along(beta - mean * alpha, y)


def sizes_of(y: Tensor) -> tuple[int, int, int] | None:
    """Return the fields of `Extent` if channels are outermost or innermost, else None."""
    if y.dim() < 4:
        return (y.numel() // y.shape[-1], y.shape[-1], 1) if y.is_contiguous() else None
    channels = y.shape[1]
    if y.is_contiguous():
        return y.shape[0], channels, y.numel() // (y.shape[0] * channels)
    nearest = torch.channels_last if y.dim() == 4 else torch.channels_last_3d
    return (y.numel() // channels, channels, 1) if y.is_contiguous(memory_format=nearest) else None


def _extent_of(y: Tensor) -> Extent:
    sizes = sizes_of(y)
    assert sizes is not None
    return Extent(*sizes)


def _addresses(norm: list[Tensor], extent: Extent) -> Norm:
    names = ("gamma", "beta", "mean", "inverse")
    return Norm(*[numbers_at(name, each, extent.channels) for name, each in zip(names, norm, strict=True)])


def statistics(y: Tensor, eps: float, running: tuple[Tensor, Tensor], share: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of every channel, summed in float64.

    The running mean and variance move in place towards the batch's mean and unbiased variance by `share`.
    """
    mean, inverse, _ = _channel_statistics(y, eps, running, share)
    return mean, inverse


def _channel_statistics(
    y: Tensor, eps: float, running: Sequence[Tensor], share: float
) -> tuple[Tensor, Tensor, Tensor]:
    extent = _extent_of(y)
    mean, inverse, variance = (y.new_empty(extent.channels) for _ in range(3))
    written = [numbers_at("statistics", each, extent.channels) for each in (mean, inverse, variance)]
    names = ("running_mean", "running_var")
    moved = [numbers_at(name, each, extent.channels) for name, each in zip(names, running, strict=False)]
    compiled().statistics(
        elements_at("y", y, y), extent, eps, *written, *(moved or (None, None)), share, threads_for(y.numel())
    )
    return mean, inverse, variance


@operator(_batch_statistics)
def batch_statistics(y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return every channel's mean, 1 / sqrt(variance + eps), and unbiased variance."""
    return _channel_statistics(y, eps, (), 0.0)


@operator(_norm_quantize)
def norm_quantize(
    y: Tensor, norm: list[Tensor], clip: list[float], grid: GridTensors, levels: list[float]
) -> tuple[Tensor, Tensor]:
    """Return codes of clamp((y - mean) * inverse * gamma + beta, *clip), and qparams."""
    codes, qparams, extent = torch.empty_like(y, dtype=torch.uint8), y.new_empty(2), _extent_of(y)
    compiled().norm_quantize(
        elements_at("y", y, y), elements_at("codes", codes, y, torch.uint8), extent, _addresses(norm, extent),
        learned_grid(grid, levels), *clip, numbers_at("step and zero", qparams, 2), threads_for(y.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(_norm_quantize_backward)
def norm_quantize_backward(
    grad: Tensor, y: Tensor, norm: list[Tensor], clip: list[float], grid: GridTensors, levels: list[float],
    follows_batch: bool, needs_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of y, gamma, beta and scale."""
    grad, grad_y = in_layout_of(grad, y), torch.empty_like(y) if needs_y else y.new_empty(0)
    grad_gamma, grad_beta = torch.empty_like(norm[0]), torch.empty_like(norm[0])
    grad_scale, extent = empty_scale(grid), _extent_of(y)
    compiled().norm_quantize_backward(
        elements_at("grad", grad, y), elements_at("y", y, y), elements_at("grad_y", grad_y, y) if needs_y else None,
        extent, _addresses(norm, extent), learned_grid(grid, levels), *clip, follows_batch,
        numbers_at("grad_gamma", grad_gamma, extent.channels), numbers_at("grad_beta", grad_beta, extent.channels),
        numbers_at("grad_scale", grad_scale, 1), threads_for(y.numel()),
    )  # fmt: skip
    return grad_y, grad_gamma, grad_beta, grad_scale


class QuantizeChainFunction(torch.autograd.Function):
    """codes = clamp(round(clip(norm(y)) / step) + zero, low, high)."""

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor,
        smallest: Tensor, zero_point: Tensor | None, levels: Levels, bounds: tuple[float, float], follows_batch: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        norm, grid = [gamma, beta, mean, inverse], [scale, smallest, zero_point]
        codes, qparams = norm_quantize(y, norm, bounds, grid, levels)
        ctx.save_for_backward(y, gamma, beta, mean, inverse, scale, smallest, zero_point)  # of which y alone is large
        ctx.levels, ctx.bounds, ctx.follows_batch = levels, bounds, follows_batch
        return outputs(ctx, codes, qparams, y)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_y, grad_gamma, grad_beta, grad_scale = norm_quantize_backward(
            grad, y, saved[:4], ctx.bounds, saved[4:], ctx.levels, ctx.follows_batch, needs[0]
        )
        norm = (grad_gamma if needs[1] else None, grad_beta if needs[2] else None)
        return grad_y if needs[0] else None, *norm, None, None, grad_scale, None, None, None, None, None


def quantize_chain(
    y: Codes | Tensor, quantizer: Quantizer, norm: nn.Module | None = None, floor: float = -math.inf,
    ceiling: float = math.inf, activation: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """Return quantizer(clip(norm(y))), as codes where kernels apply."""
    y = decode(y)
    if passes_values(y):
        bounds = (floor, ceiling)
        sizes, found = sizes_of(y) if y.numel() else None, None
        if norm is None:
            found = sum_values(y, None, quantizer, *bounds)
        elif sizes is not None and _is_simple(norm, y, sizes[1]):
            found = norm_values(y, quantizer, norm, sizes, *bounds)
        return quantizer(before_chain(y, quantizer, norm, *bounds, activation).z) if found is None else found
    learned = learned_by(quantizer, y) if is_plain(y) and y.numel() else None
    if learned is not None:
        if norm is None and (floor, ceiling) == NO_CLIP:
            if is_dense(y) and not holds_nan(codes := quantize(y, learned)):
                return codes
        elif (sizes := sizes_of(y)) is not None and (norm is None or _is_simple(norm, y, sizes[1])):
            *constants, follows = _constants(sizes[1], y) if norm is None else _norm_statistics(norm, y)
            codes = Codes(*QuantizeChainFunction.apply(y, *constants, *learned, (floor, ceiling), follows))
            if not holds_nan(codes):
                return codes
            if follows:  # the running statistics have moved
                assert isinstance(norm, AnyBatchNorm)
                y, norm = F.batch_norm(y, None, None, norm.weight, norm.bias, True, 0.0, norm.eps), None
    z: Tensor = quantizer(before_chain(y, quantizer, norm, floor, ceiling, activation).z)
    return z


def before_chain(
    y: Tensor, quantizer: Quantizer, norm: nn.Module | None = None, floor: float = -math.inf,
    ceiling: float = math.inf, activation: nn.Module | None = None,
) -> PreQuantizer:  # fmt: skip
    """Return clip(norm(y))."""
    x, bounds = y if norm is None else norm(y), (floor, ceiling)
    if activation is not None:
        z = activation(x)
    elif bounds == NO_CLIP:
        z = x
    else:
        z = F.relu(x) if bounds == (0, math.inf) else F.hardtanh(x, floor, ceiling)
    return PreQuantizer(x, z, bounds)


def _is_simple(norm: nn.Module, y: Tensor, channels: int) -> bool:
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or not (y.dim() > 3 or y.dim() == 2):
        return False
    assert isinstance(norm, AnyBatchNorm)
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    uncounted = norm.track_running_stats and (norm.num_batches_tracked is None or norm.running_mean is None)
    return not uncounted and all(
        tensor is None or (is_float32_on(tensor, y.device) and tensor.is_contiguous() and tensor.numel() == channels)
        for tensor in tensors
    )


def _constants(channels: int, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    # Of a norm that changes nothing. Four different tensors, since torch.compile takes none twice.
    return y.new_ones(channels), y.new_zeros(channels), y.new_zeros(channels), y.new_ones(channels), False


def _norm_statistics(norm: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    # gamma, beta, mean, 1 / sqrt(var + eps), and True if the last two are the batch's; updates running statistics.
    follows = norm.training or norm.running_mean is None
    if follows and y.numel() == y.shape[1]:  # in torch's own words
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {y.shape}")
    if not follows:
        mean, inverse = norm.running_mean, torch.rsqrt(norm.running_var + norm.eps)
    elif not (norm.training and norm.track_running_stats):
        mean, inverse, _ = batch_statistics(y.detach(), norm.eps)
    else:
        norm.num_batches_tracked.add_(1)
        share = 1.0 / norm.num_batches_tracked.float() if norm.momentum is None else norm.momentum
        if torch.compiler.is_compiling():
            # A compiled operator that writes in place would first copy its argument.
            mean, inverse, variance = batch_statistics(y.detach(), norm.eps)
            norm.running_mean.lerp_(mean, share)
            norm.running_var.lerp_(variance, share)
        else:
            mean, inverse = statistics(y, norm.eps, (norm.running_mean, norm.running_var), float(share))
    gamma = torch.ones_like(mean) if norm.weight is None else norm.weight
    beta = torch.zeros_like(mean) if norm.bias is None else norm.bias
    return gamma, beta, mean, inverse, follows
