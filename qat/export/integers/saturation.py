"""Whether sums of 16 bits can saturate in a file: layer by layer and channel by channel, from its integers alone.

x86 without VNNI multiplies uint8 by int8 with `vpmaddubsw`: two products are added in 16 bits, which hold -32,768 to
32,767. A sum of one channel is at worst the highest code of its input times two weights of one sign.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

HIGHEST, LOWEST = 2**15 - 1, -(2**15)
"""What 16 bits hold."""

CODES = 255
"""The highest code of an input whose bounds the file does not say."""

PRODUCTS = {"Conv": 0, "Gemm": -1, "MatMul": -1}
"""Operators with integer kernels, and the axis of their second operand along which its output channels lie; ONNX
Runtime computes a ConvTranspose in float."""

CARRYING = ("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "MaxPool", "Identity")
"""Operators of one operand that hand its integers on."""


@dataclass(frozen=True)
class Saturation:
    """What the sums of two products of one layer may reach.

    Attributes:
        layer: its name; of a product of two activations the quantizer of the second.
        sums: of every output channel the sum of two products that is farthest from 0.
    """

    layer: str
    sums: tuple[int, ...]

    @property
    def channels(self) -> tuple[int, ...]:
        """The channels where 16 bits may not hold it."""
        return tuple(channel for channel, value in enumerate(self.sums) if not LOWEST <= value <= HIGHEST)

    @property
    def largest(self) -> int:
        """The sum farthest from 0 over all channels."""
        return max(self.sums, key=abs, default=0)


def find_saturation(path: str | os.PathLike[str]) -> list[Saturation]:
    """Every product of uint8 by int8 in a file of `export_onnx`, in the order in which they run; each layer once.

    Any two weights of a channel count as a pair, not only neighbours: which inputs meet in one instruction is decided
    by how the runtime packs them, in blocks that depend on the kernel and are no one's promise. Where a channel has one
    weight only (a depthwise 1x1 convolution) its product stands alone and always fits: 255 * 128 = 32,640.

    Args:
        path: the file.
    """
    import onnx

    graph = onnx.load(path).graph
    made = {output: node for node in graph.node for output in node.output}
    stored = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, list[int]] = {}
    for node in graph.node:
        if node.op_type not in PRODUCTS:
            continue
        first, second = (made.get(name) for name in node.input[:2])
        while second is not None and second.op_type in CARRYING:
            second = made.get(second.input[0])
        if second is None or second.op_type != "DequantizeLinear":
            continue
        rows = _rows(node, second, stored, made)
        if rows is not None:
            layer = second.name.rpartition(".weight")[0] if second.input[0] in stored else second.input[0]
            code = _highest_code(first, stored, made)
            sums = [_worst_pair(row, code) for row in rows]
            found[layer] = [max(pair, key=abs) for pair in zip(sums, found.get(layer, sums), strict=True)]
    return [Saturation(layer, tuple(sums)) for layer, sums in found.items()]


def _rows(node: Any, second: Any, stored: dict[str, Any], made: dict[str, Any]) -> list[Any] | None:
    """The int8 values that meet the input, a row an output channel; None if they are no int8."""
    from onnx import numpy_helper

    if second.input[0] in stored:
        weight = numpy_helper.to_array(stored[second.input[0]])
        if weight.dtype != np.int8:
            return None
        # The axis of the scales is that of the output channels, wherever a transposition puts them.
        axes = [attribute.i for attribute in second.attribute if attribute.name == "axis"]
        scale = numpy_helper.to_array(stored[second.input[1]])
        axis = axes[0] if axes and scale.ndim else PRODUCTS[node.op_type]
        return list(np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1))
    low, high = _bounds(second, stored, made)
    # Of activations nothing but the bounds is known, and both may come twice.
    return [np.array([low, low, high, high])] if low < 0 else None


def _highest_code(first: Any, stored: dict[str, Any], made: dict[str, Any]) -> int:
    """Of the first operand in uint8, where int8 arrives with 128 added."""
    while first is not None and first.op_type in CARRYING:
        first = made.get(first.input[0])
    if first is None or first.op_type != "DequantizeLinear":
        return CODES
    low, high = _bounds(first, stored, made)
    return high + 128 if low < 0 else high


def _bounds(dequantize: Any, stored: dict[str, Any], made: dict[str, Any]) -> tuple[int, int]:
    """The lowest and highest integer of an activation: those of the Clip before it, or of its container."""
    from onnx import numpy_helper

    before = made.get(dequantize.input[0])
    if before is not None and before.op_type == "Clip":
        low, high = (int(numpy_helper.to_array(stored[name])) for name in before.input[1:3])
        return low, high
    limits = np.iinfo(numpy_helper.to_array(stored[dequantize.input[2]]).dtype)
    return int(limits.min), int(limits.max)


def _worst_pair(row: Any, code: int) -> int:
    """The sum of two products, or of one where there is one weight, that is farthest from 0."""
    ordered = np.sort(row.astype(np.int64))
    above, below = ordered[-2:].clip(min=0).sum(), ordered[:2].clip(max=0).sum()
    return int(code * (above if above >= -below else below))
