"""`find_saturation`: sums of two integer products that can saturate 16 bits.

x86 without VNNI multiplies uint8 by int8 with `vpmaddubsw`: it adds two products in 16 bits, which hold -32,768 to
32,767. The largest sum in a channel is the highest code of its input times two weights of one sign.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qat.export.onnx.graph import Array, Edges, attributes

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

HIGHEST, LOWEST = 2**15 - 1, -(2**15)
"""The range of 16 bits."""


@dataclass(frozen=True)
class Saturation:
    """The sums of two products that one layer may reach.

    Attributes:
        layer: its name; for a product of two activations the quantizer of the second.
        sums: for every output channel, the sum of two products that is farthest from 0.
    """

    layer: str
    sums: tuple[int, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels whose sum may leave 16 bits."""
        return tuple(channel for channel, value in enumerate(self.sums) if not LOWEST <= value <= HIGHEST)

    @property
    def largest(self) -> int:
        """The sum farthest from 0 over all channels."""
        return max(self.sums, key=abs, default=0)


HIGHEST_CODE = 255
"""Highest code of an input whose bounds the file does not say."""

CHANNEL_AXIS = {"Conv": 0, "Gemm": -1, "MatMul": -1}
"""Operators with integer kernels, and the axis of their second operand that holds the output channels. ConvTranspose is
missing: ONNX Runtime computes it in float."""

INTEGER_PRODUCTS = {"QLinearConv": (3, 0), "MatMulInteger": (1, -1)}
"""Operators of integers in files of other tools: which operand is the weight, and the axis of the output channels."""

PASSING = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Identity")
"""Operators of one operand whose results are some of its integers."""


def find_saturation(path: str | os.PathLike[str]) -> list[Saturation]:
    """Find every product of uint8 by int8 in a file of `export_onnx`, each layer once; in QONNX none.

    Args:
        path: the file.
    """
    import onnx

    return saturation_of(onnx.load(path).graph)


def saturation_of(graph: GraphProto) -> list[Saturation]:
    """Find them in a graph of any tool; operators have the names of their layers."""
    edges = Edges(graph)
    found: dict[str, list[int]] = {}
    for node in graph.node:
        layer, rows = "", None
        if node.op_type in INTEGER_PRODUCTS:
            place, axis = INTEGER_PRODUCTS[node.op_type]
            layer, first = node.name, node  # it reads the integers itself
            rows = _channels(edges.stored.get(node.input[place]), axis)
        elif node.op_type in CHANNEL_AXIS:
            first, second = (edges.made.get(edges.source(name, PASSING)) for name in node.input[:2])
            if second is not None and second.op_type == "DequantizeLinear":
                stays = second.input[0] in edges.stored
                layer = second.name.rpartition(".weight")[0] or node.name if stays else second.input[0]
                rows = _rows(node, second, edges)
        if rows is not None:
            code = _highest_code(first, edges)
            sums = [worst_pair(row, code) for row in rows]  # of a shared layer the worst of all its calls
            found[layer] = [max(pair, key=abs) for pair in zip(sums, found.get(layer, sums), strict=True)]
    return [Saturation(layer, tuple(sums)) for layer, sums in found.items()]


def worst_pair(row: Array, code: int) -> int:
    """Return the sum of two products farthest from 0; of one weight, its product.

    Any two weights of a channel count as a pair, not only neighbours: the runtime's packing decides which inputs meet
    in one instruction, and it depends on the kernel. A channel with one weight (a depthwise 1x1 convolution) always
    fits: 255 * 128 = 32,640.

    Args:
        row: the int8 weights of one output channel.
        code: the highest code of the input, 0 to 255.
    """
    ordered = np.sort(row.astype(np.int64))
    above, below = ordered[-2:].clip(min=0).sum(), ordered[:2].clip(max=0).sum()
    return int(code * (above if above >= -below else below))


def _rows(node: NodeProto, second: NodeProto, edges: Edges) -> list[Array] | None:
    if second.input[0] in edges.stored:
        # The axis of the scales is that of the output channels, wherever a transposition puts them.
        axis = attributes(second).get("axis") if edges.stored[second.input[1]].ndim else None
        return _channels(edges.stored[second.input[0]], CHANNEL_AXIS[node.op_type] if axis is None else axis)
    low, high = _bounds(second, edges)
    # Only the bounds of activations are known, and each may occur twice.
    return [np.array([low, low, high, high])] if low < 0 else None


def _channels(weight: Array | None, axis: int) -> list[Array] | None:
    if weight is None or weight.dtype != np.int8:  # uint8 by uint8 has kernels of 32 bits
        return None
    return list(np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1))


def _highest_code(first: NodeProto | None, edges: Edges) -> int:
    if first is None or first.op_type not in ("DequantizeLinear", *INTEGER_PRODUCTS):
        return HIGHEST_CODE
    low, high = _bounds(first, edges)
    return high + 128 if low < 0 else high  # ONNX Runtime adds 128 to int8


def _bounds(dequantize: NodeProto, edges: Edges) -> tuple[int, int]:
    # Fewer than 8 bits end with a Clip; without one the integers are those of their container.
    clip = edges.maker(edges.source(dequantize.input[0], PASSING), "Clip")
    if clip is not None:
        low, high = (int(edges.stored[name]) for name in clip.input[1:3])
        return low, high
    zero_point = edges.stored.get(dequantize.input[2]) if len(dequantize.input) > 2 else None
    limits = np.iinfo(np.uint8 if zero_point is None or zero_point.dtype.kind not in "iu" else zero_point.dtype)
    return int(limits.min), int(limits.max)
