"""BatchNorm, ReLU and quantizer in one pass, and sum, ReLU and quantizer in one pass.

Forward and backward read the layer's float output and recompute the rest. The normalised tensor, ReLU's output and the
quantized floats are never written, nor kept for backward.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.fused.functions.codes import (
    Codes,
    PreQuantizer,
    decode,
    first_derivative,
    holds_nan,
    learned_by,
    outputs,
    quantize,
    with_scale_gradient,
)
from qat.kernels.cpu.addresses import is_dense
from qat.kernels.cpu.quantizers import NO_CLIP, Levels, is_plain
from qat.kernels.operators.quantizers import (
    add_quantize,
    add_quantize_backward,
    batch_statistics,
    norm_quantize,
    norm_quantize_backward,
    sizes_of,
    statistics,
)
from qat.quantizer import Quantizer
from qat.torch_internals import AnyBatchNorm


class QuantizeChainFunction(torch.autograd.Function):
    """BatchNorm -> clip -> quantizer.

    Forward, with alpha = gamma / sqrt(var + eps) and beta' = beta - mean * alpha:
        codes = clamp(round(clip(y * alpha + beta') / step) + zero, low, high)
    Backward: the chain rule through the three; `masked` is the gradient that passes quantizer and clip. With the
        statistics of the batch
        dy = alpha * (masked - mean(masked) - (y - mean) * mean(masked * (y - mean)) / (var + eps))
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor,
        smallest: Tensor, zero_point: Tensor | None, levels: Levels, bounds: tuple[float, float], follows_batch: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The first three of `Codes`; inverse is 1 / sqrt(var + eps), bounds floor and ceiling of the clip."""
        norm, grid = [gamma, beta, mean, inverse], [scale, smallest, zero_point]
        codes, qparams = norm_quantize(y, norm, bounds, grid, levels)
        ctx.save_for_backward(y, gamma, beta, mean, inverse, scale, smallest, zero_point)  # of which y alone is large
        ctx.levels, ctx.bounds, ctx.follows_batch = levels, bounds, follows_batch
        return outputs(ctx, codes, qparams, y)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_y, grad_gamma, grad_beta, grad_scale = norm_quantize_backward(
            grad, y, saved[:4], ctx.bounds, saved[4:], ctx.levels, ctx.follows_batch, needs[0]
        )
        norm = (grad_gamma if needs[1] else None, grad_beta if needs[2] else None)
        return grad_y if needs[0] else None, *norm, None, None, grad_scale, *[None] * 5


class AddQuantizeFunction(torch.autograd.Function):
    """Sum of two quantized tensors -> clip -> quantizer; operands and result are codes."""

    @staticmethod
    def forward(
        ctx: Any, a_carrier: Tensor, b_carrier: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor,
        scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels, bounds: tuple[float, float],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The first three of `Codes`; a and b are codes, bounds floor and ceiling of the clip."""
        codes, qparams = add_quantize(a, b, a_qparams, b_qparams, bounds, [scale, smallest, zero_point], levels)
        # Codes are a quarter of the floats, and other readers keep those of both operands anyway.
        ctx.save_for_backward(a, b, a_qparams, b_qparams, scale, smallest, zero_point)
        ctx.levels, ctx.bounds = levels, bounds
        return outputs(ctx, codes, qparams, a_carrier)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_sum, grad_scale = add_quantize_backward(grad, *saved[:4], ctx.bounds, list(saved[4:]), ctx.levels)
        return grad_sum, grad_sum, *[None] * 4, grad_scale, *[None] * 4


def quantize_chain(
    y: Codes | Tensor, quantizer: Quantizer, norm: nn.Module | None = None, floor: float = -math.inf,
    ceiling: float = math.inf, activation: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """quantizer(clip(norm(y))), as codes where kernels apply; activation: the layer that clips, None for a function."""
    y = decode(y)
    learned = learned_by(quantizer, y) if is_plain(y) and y.numel() else None
    if learned is not None:
        if norm is None and (floor, ceiling) == NO_CLIP:
            if is_dense(y) and not holds_nan(codes := quantize(y, learned)):
                return codes
        elif (sizes := sizes_of(y)) is not None and (norm is None or _is_simple(norm, y, sizes[1])):
            *constants, follows = _constants(sizes[1], y) if norm is None else _statistics(norm, y)
            codes = Codes(*QuantizeChainFunction.apply(y, *constants, *learned, (floor, ceiling), follows))
            if not holds_nan(codes):
                return codes
            if follows:  # the running statistics have moved
                assert isinstance(norm, AnyBatchNorm)
                y, norm = F.batch_norm(y, None, None, norm.weight, norm.bias, True, 0.0, norm.eps), None
    z: Tensor = quantizer(before_chain(y, quantizer, norm, floor, ceiling, activation).z)
    return z


def before_chain(
    y: Tensor, quantizer: Quantizer, norm: Any = None, floor: float = -math.inf, ceiling: float = math.inf,
    activation: Any = None,
) -> PreQuantizer:  # fmt: skip
    """clip(norm(y))."""
    x, bounds = y if norm is None else norm(y), (floor, ceiling)
    if activation is not None:
        z = activation(x)
    elif bounds == NO_CLIP:
        z = x
    else:
        z = F.relu(x) if bounds == (0, math.inf) else F.hardtanh(x, floor, ceiling)
    return PreQuantizer(x, z, bounds)


def quantize_sum(
    a: Codes | Tensor, b: Codes | Tensor, quantizer: Quantizer, floor: float = -math.inf, ceiling: float = math.inf,
    activation: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """quantizer(clip(a + b)), as codes where kernels apply; the other arguments are those of `quantize_chain`."""
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
    z: Tensor = quantizer(before_sum(decode(a), decode(b), quantizer, floor, ceiling, activation).z)
    return z


def before_sum(
    a: Tensor, b: Tensor, quantizer: Quantizer, floor: float = -math.inf, ceiling: float = math.inf,
    activation: Any = None,
) -> PreQuantizer:  # fmt: skip
    """clip(a + b)."""
    return before_chain(a + b, quantizer, None, floor, ceiling, activation)


def _is_simple(norm: Any, y: Tensor, channels: int) -> bool:
    """Whether a norm is torch's own BatchNorm of these channels in float32, which kernels compute."""
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) or not (y.dim() > 3 or y.dim() == 2):
        return False
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    uncounted = norm.track_running_stats and (norm.num_batches_tracked is None or norm.running_mean is None)
    return not uncounted and all(
        tensor is None or (is_plain(tensor) and tensor.is_contiguous() and tensor.numel() == channels)
        for tensor in tensors
    )


def _constants(channels: int, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """The tensors of a norm that changes nothing; four different ones, since torch.compile takes none twice."""
    ones, zeros = (
        functools.partial(make, channels, dtype=torch.float32, device=y.device) for make in (torch.ones, torch.zeros)
    )
    return ones(), zeros(), zeros(), ones(), False


def _statistics(norm: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """gamma, beta, mean, 1 / sqrt(var + eps), and whether the last two are the batch's; updates running statistics."""
    follows = norm.training or norm.running_mean is None
    if follows and y.numel() == y.shape[1]:  # as torch
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
