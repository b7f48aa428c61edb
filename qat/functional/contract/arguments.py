"""What estimators check of their arguments, in sentences, and complete: types, grids, bits, settings, channel axes."""

import torch
from torch import Tensor

MOST_BITS = 16
"""The widest grids."""

ChannelAxis = int | tuple[int, ...] | None
"""The axis, or axes, for every index of which a statistic is taken by itself; None: one of the whole tensor."""


def require_floating(x: Tensor, caller: str) -> Tensor:
    """Return x if it is floating point, so that integers fail with a sentence instead of deep in a kernel.

    Raises:
        TypeError: for integer, bool or complex tensors.
    """
    if not x.is_floating_point():
        raise TypeError(f"{caller}: x must be a floating-point tensor, got {x.dtype}")
    return x


def check_bounds(qmin: int, qmax: int, caller: str) -> None:
    """Refuse an empty grid.

    Raises:
        ValueError: if qmin >= qmax.
    """
    if qmin >= qmax:
        raise ValueError(f"{caller}: qmin must be below qmax, got qmin={qmin} and qmax={qmax}")


def check_bits(bits: int, caller: str, fewest: int = 1, most: int = MOST_BITS) -> None:
    """Refuse a bit-width that the rule has no levels for.

    Raises:
        ValueError: if bits is no whole number from fewest to most.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not fewest <= bits <= most:
        raise ValueError(f"{caller}: bits must be a whole number from {fewest} to {most}, got {bits!r}")


def check_gradient(gradient: str, known: tuple[str, ...], caller: str) -> None:
    """Refuse the name of a gradient that the estimator does not have.

    Raises:
        ValueError: if gradient is not among the known ones.
    """
    if gradient not in known:
        raise ValueError(f"{caller}: unknown gradient {gradient!r}; known: {', '.join(known)}")


def tensor_beside(x: Tensor, value: Tensor | float) -> Tensor:
    """A parameter as a tensor on the device of x, so that a Function has one path for numbers and tensors.

    A tensor comes back as it is; a number becomes a tensor () of float32 at least, without a copy from the host.

    >>> tensor_beside(torch.zeros(3, dtype=torch.float16), 0.1)
    tensor(0.1000)
    """
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def setting_beside(x: Tensor, value: Tensor | float, name: str, caller: str) -> Tensor:
    """`tensor_beside` for a parameter that shapes the backward only: the output has the shape of x, whatever its own.

    Raises:
        ValueError: if value does not broadcast to x; the gradient would be summed over copies of x that never were.
    """
    setting = tensor_beside(x, value)
    fits = setting.ndim <= x.ndim
    for size, target in zip(reversed(setting.shape), reversed(x.shape), strict=False):
        fits = fits and size in (1, target)
    if not fits:
        raise ValueError(
            f"{caller}: {name} must broadcast to x, got shapes {tuple(setting.shape)} and {tuple(x.shape)}"
        )
    return setting


def axes_within_channel(weight: Tensor, channel_axis: ChannelAxis, caller: str) -> tuple[int, ...]:
    """The axes of weight that are no channel axis: those over which a statistic of a channel is taken.

    Raises:
        ValueError: if weight has no such axis.

    >>> axes_within_channel(torch.zeros(4, 3, 2, 2), (0, -1), "caller")
    (1, 2)
    """
    given = () if channel_axis is None else channel_axis if isinstance(channel_axis, tuple) else (channel_axis,)
    for axis in given:
        if not -weight.ndim <= axis < weight.ndim:
            right = f"in {-weight.ndim}..{weight.ndim - 1}" if weight.ndim else "None"
            shape = tuple(weight.shape)
            raise ValueError(f"{caller}: channel_axis must be {right} for a weight of shape {shape}, got {axis}")
    channels = {axis % weight.ndim for axis in given}
    return tuple(axis for axis in range(weight.ndim) if axis not in channels)
