"""Statistics of the channels of a weight, or of the whole weight."""

from collections.abc import Callable

import torch
from torch import Tensor

from qat.functional.tensors import widened

# The axis, or axes, for every index of which a statistic is taken by itself; None: one of the whole tensor.
ChannelAxis = int | tuple[int, ...] | None


def axes_within_channel(weight: Tensor, channel_axis: ChannelAxis, caller: str) -> tuple[int, ...]:
    """Return the axes of weight over which the statistic of a channel is taken."""
    given = () if channel_axis is None else channel_axis if isinstance(channel_axis, tuple) else (channel_axis,)
    for axis in given:
        if not -weight.ndim <= axis < weight.ndim:
            right = f"in {-weight.ndim}..{weight.ndim - 1}" if weight.ndim else "None"
            shape = tuple(weight.shape)
            raise ValueError(f"{caller}: channel_axis must be {right} for a weight of shape {shape}, got {axis}")
    channels = {axis % weight.ndim for axis in given}  # negative ones count from the end
    return tuple(axis for axis in range(weight.ndim) if axis not in channels)


def over(reduce: Callable[..., Tensor], x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Reduce over these axes, kept as 1; for no axes return x, where torch takes all."""
    return reduce(x, axes, keepdim=True) if axes else x


def mean_magnitude(weight: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return mean|weight| over these axes, kept as 1, in float32 at least."""
    magnitude = widened(weight)[0].abs()
    total = over(torch.sum, magnitude, axes)
    # The mean of nothing is 0 here; torch's would be NaN.
    return total / max(magnitude.numel() // max(total.numel(), 1), 1)
