"""Clipped activations on few bits: ReLU6 in front of a quantizer becomes part of the quantizer's own Clip of integers.

ONNX Runtime drops a Clip between a convolution and its quantizer only if the integers end where the Clip does. Those of
fewer than 8 bits lie in a container of 8, so it kept the Clip and computed the convolution in float: all of
MobileNetV2's. But rounding keeps the order of numbers, so Q(clip(x, low, high)) = clip(Q(x), Q(low), Q(high)) for every
x, and there a Clip of integers stands behind the quantizer anyway.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qat.export.onnx.containers import Array, stored_arrays
from qat.export.onnx.graph import readers


def fold_clips(proto: Any) -> None:
    """Leave out every Clip of floats whose readers are quantizers with a Clip of integers, which get its bounds.

    Args:
        proto: an exported file, whose quantizers of fewer than 8 bits end with a Clip of integers; it is changed.
    """
    from onnx import numpy_helper

    stored, read_by = stored_arrays(proto.graph), readers(proto.graph)
    for node in list(proto.graph.node):
        limits = _constants(node.input[1:3], stored) if node.op_type == "Clip" else None
        if limits is None or limits[0].dtype != np.float32:
            continue
        found = [_with_integer_clip(reader, read_by, stored) for reader in read_by.get(node.output[0], [])]
        if not found or None in found:
            continue
        for quantizer, clip in filter(None, found):
            bounds = _narrowed(limits, _constants(clip.input[1:3], stored), _constants(quantizer.input[1:3], stored))
            quantizer.input[0] = node.input[0]
            for place, name, value in zip((1, 2), ("low", "high"), bounds, strict=True):
                clip.input[place] = f"{clip.output[0]}.{name}_clipped"
                proto.graph.initializer.append(numpy_helper.from_array(value, clip.input[place]))
        proto.graph.node.remove(node)


def _with_integer_clip(node: Any, read_by: Mapping[str, list[Any]], stored: Mapping[str, Array]) -> Any:
    """A QuantizeLinear on one constant grid, and the only reader of its integers, a Clip; None for anything else."""
    if node is None or node.op_type != "QuantizeLinear":
        return None
    grid, after = _constants(node.input[1:3], stored), read_by.get(node.output[0], [])
    if grid is None or any(len(np.unique(part)) != 1 for part in grid) or len(after) != 1 or after[0] is None:
        return None
    (clip,) = after
    return (node, clip) if clip.op_type == "Clip" and _constants(clip.input[1:3], stored) is not None else None


def _constants(names: Any, stored: Mapping[str, Array]) -> list[Array] | None:
    """The values of two inputs; None if one is missing or computed."""
    return [stored[name] for name in names] if len(names) == 2 and all(name in stored for name in names) else None


def _narrowed(limits: Any, integers: Any, grid: Any) -> list[Array]:
    """The bounds of the integers, within those that the limits of the floats are quantized to."""
    scale, zero_point = grid[0].reshape(-1)[0], grid[1].reshape(-1)[0]
    low, high = (int(bound) for bound in integers)
    with np.errstate(over="ignore"):  # a bound of infinity, or of the largest float
        ends = [np.clip(np.rint(limit / scale) + np.float32(zero_point), low, high) for limit in limits]
    return [np.array(end, integers[0].dtype).reshape(integers[0].shape) for end in ends]
