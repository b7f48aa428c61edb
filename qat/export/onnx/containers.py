"""Containers of few bits: a file of 4-bit weights is half of one of 8-bit weights, of 2 bits a quarter."""

from typing import Any

import numpy as np
import numpy.typing as npt

READERS = {"DequantizeLinear": 0, "Gather": 0, "GatherND": 0, "QLinearConv": 3, "MatMulInteger": 1}
"""Operators that read stored integers, of a layer's weight or a table's rows, and as which operand."""

PACKED = "{}.packed"
"""Name of an initializer in a smaller container; the integers keep theirs behind the Cast."""

SINCE = {2: 25, 4: 21}
"""The bits of containers, and the opsets that brought them."""

LEAST = 64
"""Elements from which on a container of fewer bits is worth an operator."""

Array = npt.NDArray[Any]


def pack_weights(proto: Any, opset: int) -> None:
    """Store integers of few bits in the smallest container of the opset, and Cast them to the 8 bits of kernels.

    A runtime computes constants once, when it loads the file: nothing is slower. Read directly by DequantizeLinear,
    4-bit integers would make ONNX Runtime multiply in float. Of 4 bits with all their levels (-8 to 7), a channel that
    a negative gamma has negated ends at 8: then the layer's integers stay in 8 bits, and those of 2 bits in 4.
    """
    from onnx import TensorProto, helper, numpy_helper

    read = {node.input[READERS[node.op_type]] for node in proto.graph.node if node.op_type in READERS}
    unpacking: list[Any] = []
    for tensor in list(proto.graph.initializer):
        if tensor.name not in read or tensor.data_type not in (TensorProto.INT8, TensorProto.UINT8):
            continue
        values = numpy_helper.to_array(tensor)
        if values.size < LEAST:
            continue
        kind, name = tensor.data_type, tensor.name
        bits, signed = _container(values, [bits for bits, since in SINCE.items() if opset >= since])
        if bits:
            tensor.Clear()
            tensor.data_type = TensorProto.DataType.Value(f"{'' if signed else 'U'}INT{bits}")
            tensor.name, tensor.raw_data = PACKED.format(name), _in_bytes(values, bits)
            tensor.dims.extend(values.shape)
            unpacking.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.unpacked", to=kind))
    for node in reversed(unpacking):
        proto.graph.node.insert(0, node)


def stored_arrays(graph: Any) -> dict[str, Array]:
    """The constants of a graph by name; those in smaller containers also under the name of their 8-bit integers."""
    from onnx import helper, numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "Constant" and "value" in values:
            stored[node.output[0]] = numpy_helper.to_array(values["value"])
        elif node.op_type == "Constant" and "value_float" in values:
            stored[node.output[0]] = np.array(values["value_float"], np.float32)
        elif node.op_type == "Identity" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
        elif node.op_type == "Cast" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]].astype(helper.tensor_dtype_to_np_dtype(values["to"]))
    return stored


def _container(values: Array, widths: list[int]) -> tuple[int, bool]:
    """The fewest bits that hold all values, and whether as signed integers; 0 if none do."""
    for bits in widths:
        for low in (-(2 ** (bits - 1)), 0) if values.dtype == np.int8 else (0,):
            if low <= values.min() and values.max() < low + 2**bits:
                return bits, low < 0
    return 0, False


def _in_bytes(values: Array, bits: int) -> bytes:
    """Integers of few bits, the first in a byte's lowest bits; the last byte is filled with zeros."""
    count = 8 // bits
    rows = np.append(values.reshape(-1), [0] * (-values.size % count)).astype(np.uint8).reshape(-1, count)
    packed = (rows & (2**bits - 1)) << np.arange(0, 8, bits, dtype=np.uint8)
    return bytes(np.bitwise_or.reduce(packed, axis=1).tobytes())
