"""Ternary weights: a zero between two levels, computed (TWN) or learned (TTQ)."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.channels import ChannelAxis, axes_within_channel, mean_magnitude, over
from qat.functional.rounding import PassingFunction
from qat.functional.tensors import STEFunction, apply, as_dtype, broadcasts, require_floating, sum_to_shape, widened


class TernaryFunction(PassingFunction):
    """Take three levels as in `ternary_quantize`: dy/dweight = 1, constants else."""

    @staticmethod
    def forward(weight: Tensor, scale: Tensor, threshold: Tensor) -> Tensor:
        values = weight.to(scale.dtype)
        # `<=` is false for a NaN, which so meets its channel's scale, a NaN as well
        return as_dtype(torch.where(values.abs() <= threshold, 0, torch.sign(values) * scale), weight.dtype)


class TTQFunction(STEFunction):
    """Three levels, of which the outer two are learned.

    Forward:    y = positive where weight > threshold, -negative where weight < -threshold, else 0
    Backward:   dy/dweight   = positive, negative, 1 in these three places
                dy/dpositive = 1  where weight > threshold, else 0
                dy/dnegative = -1 where weight < -threshold, else 0
    """

    @staticmethod
    def forward(weight: Tensor, positive: Tensor, negative: Tensor, threshold: Tensor) -> Tensor:
        values, up, down = widened(weight, positive, negative)
        # where the weight or the threshold is NaN, no comparison is true, and their sum is NaN
        rest = torch.where(values.abs() <= threshold, 0, values + threshold)
        y = torch.where(values > threshold, up, torch.where(values < -threshold, -down, rest))
        return as_dtype(y, weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, positive, negative, threshold = ctx.saved_tensors
        values, up, down, grad = widened(weight, positive, negative, grad)
        above, below = values > threshold, values < -threshold
        grad_weight = grad_positive = grad_negative = None
        if ctx.needs_input_grad[0]:
            grad_weight = torch.where(above, grad * up, torch.where(below, grad * down, grad)).to(weight.dtype)
        if ctx.needs_input_grad[1]:
            grad_positive = sum_to_shape(torch.where(above, grad, 0), positive.shape).to(positive.dtype)
        if ctx.needs_input_grad[2]:
            grad_negative = sum_to_shape(torch.where(below, -grad, 0), negative.shape).to(negative.dtype)
        return grad_weight, grad_positive, grad_negative, None


def ternary_quantize(weight: Tensor, channel_axis: ChannelAxis = 0) -> Tensor:
    """Put every channel of a weight on three levels, -scale, 0 and scale.

    y = scale * sign(weight) where |weight| > threshold, else 0, with scale and threshold of `ternary_scale`; the
    gradient passes unchanged. A channel of zeros stays one.

    Source: Li et al., "Ternary Weight Networks", arXiv:1605.04711; there one scale a layer, channel_axis=None.

    >>> ternary_quantize(torch.tensor([[1.0, -3.0, 0.1], [0.0, 0.0, 0.0]])).tolist()
    [[2.0, -2.0, 0.0], [0.0, 0.0, 0.0]]
    """
    require_floating(weight, "ternary_quantize")
    axes = axes_within_channel(weight, channel_axis, "ternary_quantize")
    return apply(TernaryFunction, weight, *_scale_and_threshold(weight.detach(), axes))


def ternary_scale(weight: Tensor, channel_axis: ChannelAxis = 0) -> tuple[Tensor, Tensor]:
    """Return (scale, threshold) per channel, other axes kept as 1, float32 at least.

    threshold = 0.7 * mean|weight|; scale = mean of |weight| over the weights with |weight| > threshold, kept > 0.
    """
    require_floating(weight, "ternary_scale")
    return _scale_and_threshold(weight, axes_within_channel(weight, channel_axis, "ternary_scale"))


def _scale_and_threshold(weight: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mean = mean_magnitude(weight, axes)
    limits = torch.finfo(mean.dtype)
    threshold = (0.7 * mean).clamp(max=limits.max)  # finite, so that an infinite weight is above it
    magnitude = weight.to(mean.dtype).abs()
    kept = torch.logical_not(magnitude <= threshold)  # so that a NaN, for which each comparison is false, is kept
    total = over(torch.sum, torch.where(kept, magnitude, 0), axes)
    count = over(torch.sum, kept.to(mean.dtype), axes)
    return torch.where(count == 0, limits.tiny, total / count.clamp(min=1)), threshold


def ttq_quantize(weight: Tensor, positive: Tensor, negative: Tensor, threshold: float = 0.05) -> Tensor:
    """Put a weight on -negative, 0 and positive, the two levels learned.

    With limit = threshold * max|weight|: y = positive where weight > limit, -negative where weight < -limit, else 0;
    the gradients are those of `TTQFunction`. The limit counts as a constant.

    Args:
        positive, negative: the levels, > 0, in the unit of weight; shape () or broadcastable to weight. The maximum
            is taken over the axes along which `positive` is broadcast, so that every level has a limit of its own.
        threshold: share of the largest magnitude up to which weights become 0; 0 <= threshold < 1.

    Source: Zhu et al., "Trained Ternary Quantization", arXiv:1612.01064.

    >>> weight = torch.tensor([2.0, 0.05, -1.0], requires_grad=True)
    >>> positive, negative = torch.tensor(1.5, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    >>> y = ttq_quantize(weight, positive, negative)
    >>> y.sum().backward()
    >>> y.tolist(), weight.grad.tolist(), positive.grad.item(), negative.grad.item()
    ([1.5, 0.0, -0.5], [1.5, 1.0, 0.5], 1.0, -1.0)
    """
    require_floating(weight, "ttq_quantize")
    if not 0 <= threshold < 1:
        raise ValueError(f"ttq_quantize: threshold must be in 0..1 and below 1, got {threshold}")
    for name, level in (("positive", positive), ("negative", negative)):
        if not broadcasts(level.shape, weight.shape):
            raise ValueError(
                f"ttq_quantize: {name} must broadcast to the weight's shape {tuple(weight.shape)}, "
                f"got shape {tuple(level.shape)}"
            )
    return apply(TTQFunction, weight, positive, negative, threshold * _largest(weight.detach(), positive.shape))


def _largest(weight: Tensor, shape: torch.Size) -> Tensor:
    # over the axes along which this shape is broadcast; finite, so that an infinite weight is above
    lengths = (1,) * (weight.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, length in enumerate(lengths) if length == 1)
    magnitude = widened(weight)[0].abs()
    if weight.numel():  # the maximum of nothing is an error
        magnitude = over(torch.amax, magnitude, axes)
    return magnitude.clamp(max=torch.finfo(magnitude.dtype).max)
