"""The format QONNX, which flows for FPGAs read (FINN, hls4ml): floats, and one operator `Quant` for each grid."""

from typing import Any

import numpy as np

from qat.export.onnx.containers import Array, stored_arrays
from qat.export.onnx.graph import drop_unread, makers, unused_name

DOMAIN = "qonnx.custom_op.general"
"""Of Quant and BipolarQuant; no runtime for processors has them."""


def to_qonnx(proto: Any) -> None:
    """Write every quantizer as a Quant, weights as their values behind a Quant of their own, and biases as floats.

    A weight has the fewest bits that hold its integers; one of -1 and 1 alone is a BipolarQuant. Quant adds the zero
    point before it rounds: where that is odd, an exact tie goes to the other neighbour.

    Args:
        proto: an exported file as it was traced; it is changed.
    """
    from onnx import helper

    graph = proto.graph
    made, stored = makers(graph), stored_arrays(graph)
    for node in list(graph.node):
        if node.op_type == "DequantizeLinear" and node.input[0] in stored:
            _write_constant(graph, node, stored)
        elif node.op_type == "DequantizeLinear" and node.input[0] in made:
            _write_quantizer(graph, node, made, stored)
    drop_unread(graph)
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def _write_quantizer(graph: Any, node: Any, made: dict[str, Any], stored: dict[str, Array]) -> None:
    """Make the DequantizeLinear of a quantizer a Quant of what that quantizes; other dequantizations stay."""
    source = made[node.input[0]]
    clip, quantizer = (source, made.get(source.input[0])) if source.op_type == "Clip" else (None, source)
    if quantizer is None or quantizer.op_type != "QuantizeLinear":
        return
    zero_point = stored[quantizer.input[2]]
    ends = np.iinfo(zero_point.dtype)
    low, high = (ends.min, ends.max) if clip is None else (int(stored[name]) for name in clip.input[1:3])
    bits = (high - low).bit_length()
    narrow = high - low == 2**bits - 2 and bits > 1
    if high - low != 2**bits - 1 - narrow:
        raise ValueError(
            f"export_onnx: {quantizer.name!r} has the integers {low} to {high}; QONNX has whole bits alone"
        )
    signed = low != 0 or narrow
    offset = low + 2 ** (bits - 1) - narrow if signed else 0  # of a signed grid with a zero point, stored in uint8
    node.name = quantizer.name
    numbers = {"scale": quantizer.input[1], "zeropt": int(zero_point) - offset, "bitwidth": bits}
    _rewrite(graph, node, quantizer.input[0], numbers, signed=signed, narrow=narrow)


def _write_constant(graph: Any, node: Any, stored: dict[str, Array]) -> None:
    """Make the DequantizeLinear of constants a Quant of their values; of a bias those values."""
    from onnx import numpy_helper

    integers, scale = (stored[name] for name in node.input[:2])
    zero = stored[node.input[2]].astype(np.float32) if len(node.input) > 2 else np.zeros_like(scale)
    axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
    shape = [-1 if place == axis else 1 for place in range(integers.ndim)] if scale.ndim else []
    scale, zero = scale.reshape(shape), zero.reshape(shape) if zero.any() else np.zeros(())
    values = ((integers - zero) * scale).astype(np.float32)
    if integers.dtype == np.int32:
        graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        graph.node.remove(node)
        return
    x = _store(graph, node.name or f"{node.output[0]}.values", values)
    if np.isin(integers, (-1, 1)).all():
        _rewrite(graph, node, x, {"scale": scale})
        return
    low, high, signed = int(integers.min()), int(integers.max()), integers.dtype == np.int8
    bits = max(2, signed + max(high.bit_length(), (-low - 1).bit_length() if low < 0 else 0))
    narrow = signed and low > -(2 ** (bits - 1))
    numbers = {"scale": scale, "zeropt": zero, "bitwidth": bits}
    _rewrite(graph, node, x, numbers, signed=signed, narrow=narrow)


def _rewrite(graph: Any, node: Any, x: str, numbers: dict[str, Any], **kind: bool) -> None:
    """Make a node a Quant of x, with a scale alone a BipolarQuant; the numbers are values, or names of initializers."""
    from onnx import helper

    prefix = node.name or node.output[0]
    inputs = [n if isinstance(n, str) else _store(graph, f"{prefix}.{key}", n) for key, n in numbers.items()]
    node.op_type, node.domain, node.input[:] = "Quant" if kind else "BipolarQuant", DOMAIN, [x, *inputs]
    del node.attribute[:]
    attributes = {**{key: int(value) for key, value in kind.items()}, "rounding_mode": "ROUND"} if kind else {}
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())


def _store(graph: Any, wanted: str, value: Any) -> str:
    """Add floats to the initializers, and return their name."""
    from onnx import numpy_helper

    name = unused_name(graph, wanted)
    graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    return name
