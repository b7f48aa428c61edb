"""Inputs in other shapes: more axes for x, parameters per channel, batches of both."""

from collections.abc import Iterator

import torch
from torch import Tensor

from qat.testing.estimator import Estimator, Inputs

LEADING = (2, 3, 2, 2)
COPIES = 3


def with_axes(estimator: Estimator, x: Tensor, axes: int) -> Tensor:
    """x repeated along new leading axes until it has `axes` axes; parameters still broadcast as before.

    If the function is not elementwise, x is returned unchanged.
    """
    if not estimator.elementwise or x.ndim >= axes:
        return x
    return x.expand(*LEADING[: axes - x.ndim], *x.shape).contiguous()


def parameter_shapes(x: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every shape in which a parameter broadcasts against x: per tensor, and per channel along each axis."""
    yield "()", ()
    yield "(1,)", (1,)
    for axis, channels in enumerate(x.shape):
        short = (channels,) + (1,) * (x.ndim - axis - 1)
        yield f"{short}", short
        if axis:
            yield f"{(1,) * axis + short}", (1,) * axis + short


def per_channel(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The parameter's first value in this shape, times 1, 9/8, 10/8 .. 15/8 from channel to channel."""
    first = parameter.detach().flatten()[0]
    factors = 1 + torch.arange(torch.Size(shape).numel(), dtype=torch.float64) % 8 / 8
    return (first * factors).reshape(shape)


def batches(inputs: Inputs) -> Inputs:
    """Each input COPIES times along a new first axis: x with its values in another order, parameters times 1 + k/8."""
    x = torch.stack([inputs[0].detach().flatten().roll(k).reshape(inputs[0].shape) for k in range(COPIES)])
    return x, *(torch.stack([p.detach() * (1 + k / 8) for k in range(COPIES)]) for p in inputs[1:])


def without_elements(estimator: Estimator, inputs: Inputs) -> Inputs:
    """x with no element, and parameters that still broadcast against it."""
    x, parameters = inputs[0], inputs[1:]
    if estimator.elementwise:
        return x.new_empty((0, *x.shape)), *parameters
    for axis in range(x.ndim):
        back = axis - x.ndim
        if all(p.ndim < -back or p.shape[back] == 1 for p in parameters):
            return x.new_empty((*x.shape[:axis], 0, *x.shape[axis + 1 :])), *parameters
    single = tuple(p.flatten()[0] if slot in estimator.broadcast else p for slot, p in enumerate(parameters, start=1))
    return x.new_empty((0, *x.shape[1:])), *single
