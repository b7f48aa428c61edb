"""How many scales a tensor has, and the view in which they broadcast: per tensor, per channel, per group of inputs."""

import math

from torch import Tensor

from qat.spec import QuantSpec, default_spec


def scale_shape(spec: QuantSpec, weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight (out, in, ...), such that they broadcast over `to_groups(weight, spec)`.

    tensor: ();  channel: (out, 1, ...);  group: (out, in / group_size, 1, ...), one axis more than the weight. A
    ValueError is raised if group_size does not divide the inputs, or there is no input axis.

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
    """x with its input axis split into (groups, group_size), where the granularity is "group"; else x as it is."""
    if spec.granularity != "group":
        return x
    assert spec.group_size is not None
    return x.reshape(x.shape[0], -1, spec.group_size, *x.shape[2:])


def from_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """The inverse of `to_groups`."""
    return x.flatten(1, 2) if spec.granularity == "group" else x


def shared_axes(x: Tensor, shape: tuple[int, ...]) -> list[int]:
    """The axes of a (grouped) tensor along which a scale of this shape is the same."""
    return [axis for axis in range(x.dim()) if not shape or shape[axis] == 1]


def as_rows(weight: Tensor, spec: QuantSpec) -> Tensor:
    """The weight as (scales, elements): one row for each scale, in the order of the scales."""
    if spec.granularity == "tensor":
        return weight.reshape(1, -1)
    return to_groups(weight, spec).reshape(math.prod(scale_shape(spec, tuple(weight.shape))), -1)
