"""Shapes and views of scales per tensor, per channel and per group of inputs."""

import math

from torch import Tensor

from qat.spec import QuantSpec, default_spec


def scale_shape(spec: QuantSpec, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight (out, in, ...).

    tensor: ();  channel: (out, 1, ...);  group: (out, in / group_size, 1, ...), one axis more than the weight. It
    broadcasts over `to_groups(weight, spec)`. A group_size that does not divide the inputs, or no input axis, is a
    ValueError.

    >>> scale_shape(QuantSpec(granularity="group", group_size=16), (8, 64, 3, 3))
    (8, 4, 1, 1, 1)
    """
    spec = spec.resolved(default_spec("weight"))
    if spec.granularity == "tensor":
        return ()
    trailing = (1,) * (len(weight_shape) - 1)
    if spec.granularity == "channel":
        return (weight_shape[0], *trailing)
    assert spec.group_size is not None
    if len(weight_shape) < 2:
        raise ValueError(f"group_size={spec.group_size} needs an input axis, and the weight's shape is {weight_shape}")
    inputs = weight_shape[1]
    if inputs % spec.group_size:
        divisors = ", ".join(str(size) for size in range(1, inputs + 1) if inputs % size == 0)
        raise ValueError(f"group_size={spec.group_size} does not divide the weight's {inputs} inputs; use {divisors}")
    return (weight_shape[0], inputs // spec.group_size, *trailing)


def to_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """Split the input axis into (groups, group_size) if the granularity is "group"."""
    if spec.granularity != "group":
        return x
    assert spec.group_size is not None
    return x.reshape(x.shape[0], -1, spec.group_size, *x.shape[2:])


def from_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """Undo `to_groups`."""
    return x.flatten(1, 2) if spec.granularity == "group" else x


def shared_axes(x: Tensor, shape: tuple[int, ...]) -> list[int]:
    """Return the axes of a (grouped) tensor that share each scale of this shape."""
    return [axis for axis in range(x.dim()) if not shape or shape[axis] == 1]


def as_rows(weight: Tensor, spec: QuantSpec) -> Tensor:
    """View a weight as (scales, elements): a row for each scale, in their order."""
    if spec.granularity == "tensor":
        return weight.reshape(1, -1)
    return to_groups(weight, spec).reshape(math.prod(scale_shape(spec, tuple(weight.shape))), -1)
