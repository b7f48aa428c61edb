"""BatchNorm, ReLU and quantizer in one pass, and sum, ReLU and quantizer: the codes that the next layer reads.

Forward and backward read what they need from the layer's float output and recompute the rest, so that neither the
normalised tensor, nor ReLU's, nor the quantized one is ever written, or kept for backward.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.kernels.chains import (
    ClippedGrid,
    Norm,
    Operand,
    add_quantize,
    add_quantize_backward,
    extent_of,
    norm_quantize,
    norm_quantize_backward,
    statistics,
)
from qat.kernels.cpu import Extent, is_dense, is_plain, like
from qat.layers.codes import (
    Codes,
    GridInForce,
    carrier_for,
    connected,
    decode,
    grid_in_force,
    in_codes,
    in_training,
    is_unwatched,
    quantize,
)
from qat.layers.first_derivative import first_derivative
from qat.quantizer import Quantizer


@dataclass(frozen=True)
class Clip:
    """What stands between a tensor and its quantizer: ReLU, ReLU6, Hardtanh, or nothing.

    Attributes:
        floor, ceiling: the bounds; -inf and inf for nothing.
        module: the layer that does it; None for a function.
    """

    floor: float = -math.inf
    ceiling: float = math.inf
    module: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it with torch's own operations."""
        if self.module is not None:
            y: Tensor = self.module(x)
            return y
        if not self.clips:
            return x
        return F.relu(x) if (self.floor, self.ceiling) == (0, math.inf) else F.hardtanh(x, self.floor, self.ceiling)

    @property
    def clips(self) -> bool:
        """Whether it does anything."""
        return (self.floor, self.ceiling) != (-math.inf, math.inf)

    def is_unwatched(self) -> bool:
        """Whether it may be computed without being called."""
        return self.module is None or is_unwatched(self.module)


class QuantizeChainFunction(torch.autograd.Function):
    """BatchNorm -> clip -> quantizer.

    Forward, with alpha = gamma / sqrt(var + eps) and beta' = beta - mean * alpha:
        codes = clamp(round(clip(y * alpha + beta') / step) + zero, low, high)
    Backward: that of the three after each other; `masked` is the gradient behind quantizer and clip, and with
        statistics of the batch
        dy = alpha * (masked - mean(masked) - (y - mean) * mean(masked * (y - mean)) / (var + eps))
    """

    @staticmethod
    def forward(
        y: Tensor, scale: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, inverse: Tensor, extent: Extent,
        clipped: ClippedGrid, force: GridInForce, follows_batch: bool,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """Carrier, codes, and whether there was a NaN; inverse is 1 / sqrt(var + eps)."""
        codes, bad = norm_quantize(y, extent, Norm(gamma, beta, mean, inverse), clipped)
        return carrier_for(codes), codes, bad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, bool]) -> None:
        """Only the layer's output is large."""
        ctx.save_for_backward(*inputs[:6])
        ctx.extent, ctx.clipped, ctx.force, ctx.follows_batch = inputs[6:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Two passes: the sums, then dy."""
        y, scale, gamma, beta, mean, inverse = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_y, grad_gamma, grad_beta, total = norm_quantize_backward(
            like(grad, y), y, ctx.extent, Norm(gamma, beta, mean, inverse), ctx.clipped, ctx.follows_batch, needs[0]
        )
        learned = (grad_gamma if needs[2] else None, grad_beta if needs[3] else None)
        return grad_y, ctx.force.parameter_gradient(total, scale), *learned, *[None] * 6


class AddQuantizeFunction(torch.autograd.Function):
    """Sum of two quantized tensors -> clip -> quantizer, all of them codes."""

    @staticmethod
    def forward(
        a_carrier: Tensor, b_carrier: Tensor, scale: Tensor, a_codes: Tensor, b_codes: Tensor,
        steps: tuple[float, float, float, float], clipped: ClippedGrid, force: GridInForce,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """Carrier, codes, and whether there was a NaN; steps are step and zero of a, then of b."""
        codes, bad = add_quantize(Operand(a_codes, *steps[:2]), Operand(b_codes, *steps[2:]), clipped)
        return carrier_for(codes), codes, bad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, bool]) -> None:
        """Codes of the operands: a quarter of their floats, and both have readers that keep them anyway."""
        ctx.save_for_backward(*inputs[2:5])
        ctx.steps, ctx.clipped, ctx.force = inputs[5:]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Both operands have the same gradient."""
        scale, a_codes, b_codes = ctx.saved_tensors
        a, b = Operand(a_codes, *ctx.steps[:2]), Operand(b_codes, *ctx.steps[2:])
        grad_sum, total = add_quantize_backward(like(grad, a_codes), a, b, ctx.clipped)
        return grad_sum, grad_sum, ctx.force.parameter_gradient(total, scale), *[None] * 5


def quantize_chain(
    y: Codes | Tensor, quantizer: Quantizer, norm: nn.Module | None = None, floor: float = -math.inf,
    ceiling: float = math.inf, activation: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """quantizer(clip(norm(y))), as codes where kernels apply.

    Args:
        y: a layer's output.
        quantizer: whose codes are wanted.
        norm: a BatchNorm, or None.
        floor, ceiling: of a ReLU; -inf and inf for none.
        activation: the ReLU, if it is a module.
    """
    y, clip = decode(y), Clip(floor, ceiling, activation)
    ready = is_plain(y) and y.numel() > 0 and is_plain(quantizer.scale) and in_training(quantizer)
    if ready and clip.is_unwatched():
        if norm is None and not clip.clips:
            if is_dense(y):
                return quantize(y, quantizer)
        elif (extent := extent_of(y)) is not None and (norm is None or _is_simple(norm, y)):
            force = grid_in_force(quantizer, y)
            numbers = _constants(extent) if norm is None else _statistics(norm, y, extent)
            clipped = ClippedGrid(force.grid, floor, ceiling)
            made: Any = QuantizeChainFunction.apply(
                y, quantizer.scale, *numbers[:4], extent, clipped, force, numbers[4]
            )
            return in_codes(made, force)
    z: Tensor = quantizer(clip(y if norm is None else norm(y)))
    return z


def quantize_sum(
    a: Codes | Tensor, b: Codes | Tensor, quantizer: Quantizer, floor: float = -math.inf, ceiling: float = math.inf,
    activation: nn.Module | None = None,
) -> Codes | Tensor:  # fmt: skip
    """quantizer(clip(a + b)), as codes where kernels apply; arguments as of `quantize_chain`."""
    clip = Clip(floor, ceiling, activation)
    if (
        isinstance(a, Codes) and isinstance(b, Codes) and a.shape == b.shape and a.codes.stride() == b.codes.stride()
        and in_training(quantizer) and clip.is_unwatched()
    ):  # fmt: skip
        a, b = connected(a), connected(b)
        force = grid_in_force(quantizer, a.codes)
        steps = (a.step, a.zero, b.step, b.zero)
        made: Any = AddQuantizeFunction.apply(
            a.carrier,
            b.carrier,
            quantizer.scale,
            a.codes,
            b.codes,
            steps,
            ClippedGrid(force.grid, floor, ceiling),
            force,
        )
        return in_codes(made, force)
    z: Tensor = quantizer(clip(decode(a) + decode(b)))
    return z


def _is_simple(norm: nn.Module, y: Tensor) -> bool:
    """Whether it is torch's own BatchNorm, in float32, and unwatched: what the kernels compute."""
    tensors: tuple[Any, ...] = (norm.weight, norm.bias, norm.running_mean)
    return (
        type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        and is_unwatched(norm)
        and all(tensor is None or (is_plain(tensor) and tensor.is_contiguous()) for tensor in tensors)
        and (y.dim() > 3 or y.dim() == 2)
    )


def _constants(extent: Extent) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    one, zero = torch.ones(extent.channels), torch.zeros(extent.channels)
    return one, zero, zero, one, False


def _statistics(norm: Any, y: Tensor, extent: Extent) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """gamma, beta, mean, 1 / sqrt(var + eps), and whether these are the batch's; running statistics are updated."""
    follows = norm.training or norm.running_mean is None
    if follows:
        running, share = None, 0.0
        if norm.training and norm.track_running_stats:
            norm.num_batches_tracked.add_(1)
            share = 1.0 / norm.num_batches_tracked.item() if norm.momentum is None else norm.momentum
            running = (norm.running_mean, norm.running_var)
        mean, inverse = statistics(y, extent, norm.eps, running, share)
    else:
        mean, inverse = norm.running_mean, torch.rsqrt(norm.running_var + norm.eps)
    gamma = torch.ones_like(mean) if norm.weight is None else norm.weight
    beta = torch.zeros_like(mean) if norm.bias is None else norm.bias
    return gamma, beta, mean, inverse, follows
