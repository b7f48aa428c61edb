"""Barriers: an operator without effect, where ONNX Runtime's optimisation would compute another function.

- Of `QuantizeLinear, DequantizeLinear, QuantizeLinear, DequantizeLinear` with two grids, `DoubleQDQPairsRemover` makes
  one pair, whose range is the intersection of both: every value is rounded to a third grid.
- A Conv, ConvTranspose or Gemm with a float weight between DequantizeLinear and QuantizeLinear is taken for one whose
  weight was forgotten: `WeightBiasQuantization` rounds it to int8, with one scale for the whole tensor. But such a
  layer is one that the recipe leaves in float.

Neither looks through a LeakyRelu of slope 1, which returns its input on every runtime. Between two grids it becomes a
table of 256 integers; in front of a float layer it is a pass over the layer's input.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qat.export.onnx.containers import Array, stored_arrays
from qat.export.onnx.graph import makers, unused_name

MOVING = (
    "Identity", "Dropout", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand",
    "MaxPool", "Relu", "Clip",
)  # fmt: skip
"""Operators that the runtime removes, or moves a quantizer across, so that those around them become neighbours."""

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators whose float weight the runtime would quantize; of MatMul and the Add of a bias it makes a Gemm."""


def add_barriers(proto: Any) -> None:
    """Put a LeakyRelu of slope 1 in front of every quantizer that requantizes, and of every float layer on a grid."""
    from onnx import helper

    graph = proto.graph
    stored, made_by = stored_arrays(graph), makers(graph)
    for place, node in reversed(list(enumerate(graph.node))):
        if _requantizes(node, made_by, stored) or _is_float_layer(node, made_by, stored):
            barrier = unused_name(graph, f"{node.input[0]}.barrier")
            graph.node.insert(place, helper.make_node("LeakyRelu", node.input[:1], [barrier], name=barrier, alpha=1.0))
            graph.node[place + 1].input[0] = barrier


def _requantizes(node: Any, made_by: Mapping[str, Any], stored: Mapping[str, Array]) -> bool:
    """Whether the values that a QuantizeLinear reads lie on another grid than its own."""
    before = grid_of_tensor(node.input[0], made_by, stored) if node.op_type == "QuantizeLinear" else None
    if before is None or any(name not in stored for name in before.input[1:]):
        return False  # the rows of a table bring their scales; only constant grids are merged
    grids = [[stored[name] for name in each.input[1:]] for each in (before, node)]
    return not all(np.array_equal(ours, theirs) for ours, theirs in zip(*grids, strict=True))


def _is_float_layer(node: Any, made_by: Mapping[str, Any], stored: Mapping[str, Array]) -> bool:
    """Whether an operator multiplies values on a grid by a float weight."""
    is_float = node.op_type in LAYERS and _origin(node.input[1], made_by) in stored
    return is_float and grid_of_tensor(node.input[0], made_by, stored) is not None


def grid_of_tensor(name: str, made_by: Mapping[str, Any], stored: Mapping[str, Array]) -> Any:
    """The DequantizeLinear of the activation that a tensor holds values of, if there is one."""
    node = made_by.get(_origin(name, made_by))
    return node if node is not None and node.op_type == "DequantizeLinear" and node.input[0] not in stored else None


def _origin(name: str, made_by: Mapping[str, Any]) -> str:
    """The tensor whose values the operators in `MOVING` hand on."""
    while name in made_by and made_by[name].op_type in MOVING:
        name = made_by[name].input[0]
    return name
