"""Quantizers that requantize: ONNX Runtime merges them with the quantizer before, which computes another function.

Of `QuantizeLinear, DequantizeLinear, QuantizeLinear, DequantizeLinear` with two grids, the optimisation
`DoubleQDQPairsRemover` makes one pair, whose range is the intersection of both: every value is rounded to a third grid.
It does so only where scales and zero points are scalars. A requantizing QuantizeLinear therefore gets its scale and its
zero point once for every channel, all equal: the same function, and the layers around it still become integer ones.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

MOVING = (
    "Identity", "Dropout", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand",
    "MaxPool", "Relu", "Clip",
)  # fmt: skip
"""Operators that the runtime removes, or moves a quantizer across, so that the two pairs become neighbours."""


def keep_requantizations(proto: Any) -> None:
    """Give every QuantizeLinear whose input lies on another grid a scale for each channel.

    Args:
        proto: an exported file that still has the shapes of its tensors (`value_info`); it is changed.
    """
    from onnx import helper, numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    made_by = {name: node for node in proto.graph.node for name in node.output}
    shapes = {
        info.name: [axis.dim_value for axis in info.type.tensor_type.shape.dim]  # 0: a free axis
        for info in (*proto.graph.value_info, *proto.graph.input)
    }
    for node in proto.graph.node:
        if node.op_type != "QuantizeLinear" or not _requantizes(node, made_by, stored):
            continue
        axis, length = _channels(shapes.get(node.input[0], []))
        if not length:
            warnings.warn(
                f"export_onnx: {node.name!r} requantizes a tensor without an axis of fixed length, and ONNX Runtime may"
                " round once where the model rounds twice; verify_onnx shows whether it does",
                stacklevel=3,
            )
            continue
        for place in (1, 2):
            name = f"{node.output[0]}.{('scales', 'zero_points')[place - 1]}"
            values = np.repeat(stored[node.input[place]].reshape(1), length)
            proto.graph.initializer.append(numpy_helper.from_array(values, name))
            node.input[place] = name
        node.attribute.append(helper.make_attribute("axis", axis))


def _requantizes(node: Any, made_by: Mapping[str, Any], stored: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    """Whether the values that a QuantizeLinear reads lie on another grid than its own."""
    before = made_by.get(node.input[0])
    while before is not None and before.op_type in MOVING:
        before = made_by.get(before.input[0])
    if before is None or before.op_type != "DequantizeLinear" or before.input[0] in stored:
        return False
    if any(name not in stored for name in before.input[1:]):
        return False  # the rows of a table bring their scales; only constant grids are merged
    grids = [[stored[name] for name in each.input[1:]] for each in (before, node)]
    return not all(np.array_equal(ours, theirs) for ours, theirs in zip(*grids, strict=True))


def _channels(shape: list[int]) -> tuple[int, int]:
    """The first axis with a fixed length of at least 2, and its length; the length is 0 if there is none."""
    return next(((axis, length) for axis, length in enumerate(shape) if length > 1), (0, 0))
