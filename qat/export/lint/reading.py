"""An ONNX graph as quantizers, grids and layers, whoever wrote it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qat.export.onnx.containers import Array, stored_arrays
from qat.export.onnx.graph import makers, readers

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

LAYERS = {"Conv": 0, "ConvTranspose": 1, "Gemm": -1, "MatMul": -1}
"""Operators with a weight, and the axis of its output channels."""


@dataclass(frozen=True)
class Grid:
    """The grid of one QuantizeLinear or DequantizeLinear: `scale` and `zero_point` are None where the model computes
    them, `kind` is the name of the integers' type, `axis` that of the scales."""

    node: Any
    scale: Array | None
    zero_point: Array | None
    kind: str
    axis: int

    def equals(self, other: "Grid") -> bool:
        """Whether it is known that both have the same scale, zero point and type."""
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        same = all(a is not None and b is not None and np.array_equal(np.ravel(a), np.ravel(b)) for a, b in pairs)
        return same and self.kind == other.kind


class QuantizedGraph:
    """A graph, and the operators that its runtime moves quantizers across: their first operand's values are theirs."""

    def __init__(self, graph: Any, moving: Sequence[str]) -> None:
        self.nodes, self.moving = list(graph.node), moving
        self.made, self.read, self.stored = makers(graph), readers(graph), stored_arrays(graph)
        self.constant = set(self.stored)
        axes = [axis for each in graph.input for axis in each.type.tensor_type.shape.dim]
        self.free = not all(axis.HasField("dim_value") for axis in axes)  # whether a batch may have any size
        for node in self.nodes:
            if node.input and all(name in self.constant for name in node.input if name):
                self.constant.update(node.output)

    def grid(self, node: Any) -> Grid:
        """The grid of a QuantizeLinear or a DequantizeLinear."""
        from onnx import TensorProto, helper

        scale, zero_point = (self.stored.get(name) for name in [*node.input[1:3], ""][:2])
        attributes = {each.name: each.i for each in node.attribute}
        quantize = node if is_quantize(node) else self.maker(node.input[0], QUANTIZE)
        typed = zero_point if zero_point is not None else self.stored.get(node.input[0])
        if typed is not None and typed.dtype != np.float32:
            kind = typed.dtype.name
        elif quantize is not None and quantize is not node:
            kind = self.grid(quantize).kind
        else:
            kind = helper.tensor_dtype_to_np_dtype(attributes.get("output_dtype", 0) or TensorProto.UINT8).name
        if len(node.input) < 3 or not node.input[2]:
            zero_point = np.zeros(1)
        return Grid(node, scale, zero_point, kind, attributes.get("axis", 1))

    def maker(self, name: str, *kinds: str) -> Any:
        """The operator that makes a tensor, if it is of these kinds."""
        node = self.made.get(name)
        return node if node is not None and node.op_type in kinds else None

    def moves(self, node: Any) -> bool:
        """Whether the values of an operator are its first operand's; those of a linear Resize are not."""
        modes = [each.s for each in node.attribute if each.name == "mode"] if node is not None else []
        return node is not None and node.op_type in self.moving and modes in ([], [b"nearest"])

    def origin(self, name: str) -> str:
        """The tensor whose values were moved to this one."""
        while self.moves(self.made.get(name)):
            name = self.made[name].input[0]
        return name

    def grid_of(self, name: str) -> Grid | None:
        """The grid of the values of a tensor, which may have been moved; None for floats."""
        node = self.maker(self.origin(name), DEQUANTIZE)
        return None if node is None else self.grid(node)

    def behind(self, name: str) -> list[Any]:
        """Who reads a tensor, across operators that move it; None is the user. Equal quantizers are one reader."""
        found: list[Any] = []
        for node in self.read.get(name, []):
            for each in self.behind(node.output[0]) if self.moves(node) else [node]:
                known = [self.grid(other) for other in found if is_quantize(other)]
                if not is_quantize(each) or not any(self.grid(each).equals(other) for other in known):
                    found.append(each)
        return found

    def channel_axis(self, layer: Any, weight: Grid) -> int | None:
        """The axis of the stored weight that holds a layer's output channels; None behind a reshape."""
        rank = len(getattr(self.stored.get(weight.node.input[0]), "shape", "12"))
        turned = any(each.name == "transB" and each.i for each in layer.attribute)
        name, axis = layer.input[1], (0 if turned else LAYERS[layer.op_type]) % rank
        while name != weight.node.output[0]:
            node = self.made[name]
            order = next((list(each.ints) for each in node.attribute if each.name == "perm"), list(range(rank))[::-1])
            if node.op_type not in ("Transpose", "Identity"):
                return None
            name, axis = node.input[0], order[axis] if node.op_type == "Transpose" else axis
        return axis


def is_quantize(node: Any) -> bool:
    """Whether a reader is a QuantizeLinear."""
    return node is not None and node.op_type == QUANTIZE
