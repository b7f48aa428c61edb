"""Clipped activations: a ReLU or ReLU6 in front of a quantizer becomes a Clip of the quantizer's integers.

ONNX Runtime drops a Clip between a convolution and its quantizer only if the integers end where the Clip does. Those of
fewer than 8 bits lie in a container of 8, and a trained range may be wider than ReLU6's: then it keeps the Clip and
computes the convolution in float. But rounding keeps the order of numbers, so Q(clip(x, low, high)) = clip(Q(x),
Q(low), Q(high)) for every x.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qat.export.onnx.containers import Array, stored_arrays
from qat.export.onnx.graph import readers

LEVELS = (np.array(0, np.uint8), np.array(255, np.uint8))
"""The integers of uint8."""


def fold_clips(proto: Any) -> None:
    """Leave out every Clip and Relu of floats whose readers are quantizers, whose integers are clipped instead.

    Those that ONNX Runtime drops by itself stay. An integer Clip is added in uint8 alone: the int8 grids of TensorRT,
    which reads no such Clip, keep theirs in float.

    Args:
        proto: an exported file, whose quantizers of fewer than 8 bits end with a Clip of integers; it is changed.
    """
    from onnx import numpy_helper

    stored, read_by = stored_arrays(proto.graph), readers(proto.graph)
    for node in list(proto.graph.node):
        limits = _limits(node, stored)
        found = [_integers_of(each, read_by, stored) for each in read_by.get(node.output[0], [])] if limits else []
        if not found or None in found or all(clip is None and _ends_within(limits, grid) for _, clip, grid in found):
            continue
        for quantizer, clip, grid in found:
            quantizer.input[0] = node.input[0]
            within = LEVELS if clip is None else _constants(clip.input[1:3], stored)
            bounds = _narrowed(limits, within, grid)
            if clip is None and bounds == list(LEVELS):
                continue
            clip = clip or _added_clip(proto.graph, quantizer)
            for place, name, value in zip((1, 2), ("low", "high"), bounds, strict=True):
                clip.input[place] = f"{clip.output[0]}.{name}_clipped"
                proto.graph.initializer.append(numpy_helper.from_array(value, clip.input[place]))
        proto.graph.node.remove(node)


def _limits(node: Any, stored: Mapping[str, Array]) -> list[Array] | None:
    """The floats between which an operator clips; None if it does not."""
    if node.op_type == "Relu":
        return [np.array(0, np.float32), np.array(np.inf, np.float32)]
    limits = _constants(node.input[1:3], stored) if node.op_type == "Clip" else None
    return limits if limits is not None and limits[0].dtype == np.float32 else None


def _integers_of(node: Any, read_by: Mapping[str, list[Any]], stored: Mapping[str, Array]) -> Any:
    """A QuantizeLinear on one constant grid, the Clip of its integers or None, and the grid; None for anything else."""
    if node is None or node.op_type != "QuantizeLinear":
        return None
    grid, after = _constants(node.input[1:3], stored), read_by.get(node.output[0], [])
    if grid is None or any(len(np.unique(part)) != 1 for part in grid):
        return None
    clip = after[0] if len(after) == 1 and after[0] is not None and after[0].op_type == "Clip" else None
    if clip is None:
        return (node, None, grid) if grid[1].dtype == np.uint8 else None
    return (node, clip, grid) if _constants(clip.input[1:3], stored) is not None else None


def _ends_within(limits: Any, grid: Any) -> bool:
    """Whether the values of a grid of 8 bits end within limits, so that clipping them changes nothing."""
    low, high = ((level - grid[1].astype(np.float32).max()) * grid[0].max() for level in LEVELS)
    return bool(low >= limits[0] and high <= limits[1])


def _added_clip(graph: Any, quantizer: Any) -> Any:
    """A Clip behind a QuantizeLinear, whose integers it hands on under their name."""
    from onnx import helper

    name = quantizer.output[0]
    place = list(graph.node).index(quantizer)
    quantizer.output[0] = f"{name}.unclipped"
    graph.node.insert(place + 1, helper.make_node("Clip", [quantizer.output[0], "", ""], [name], name=f"{name}.clip"))
    return graph.node[place + 1]


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
