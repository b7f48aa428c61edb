"""Containers of few bits: a file of 4-bit weights is half of one of 8-bit weights."""

from typing import Any

import numpy as np
import numpy.typing as npt

READERS = ("DequantizeLinear", "Gather", "GatherND")
"""Operators that read stored integers as their first operand: of a layer's weight, of a table's rows."""

PACKED = "{}.packed"
"""Name of an initializer in a 4-bit container; the integers keep theirs behind the Cast."""

LEAST = 64
"""Elements from which on a container of fewer bits is worth an operator."""

Array = npt.NDArray[Any]


def pack_weights(proto: Any) -> None:
    """Store integers of at most 4 bits in INT4 or UINT4, and Cast them to the 8 bits that kernels read.

    A channel that a negative gamma has negated goes from -7 to 8: then each channel is stored from its lowest integer
    on, which is added behind the Cast. A runtime computes constants once, when it loads the file: nothing is slower.
    Read directly by DequantizeLinear, 4-bit integers would make ONNX Runtime multiply in float. 2 bits take 4 too: ONNX
    has no smaller container that is read.
    """
    from onnx import TensorProto, numpy_helper

    read = {node.input[0]: node for node in proto.graph.node if node.op_type in READERS}
    unpacking: list[Any] = []
    for tensor in list(proto.graph.initializer):
        if tensor.name not in read or tensor.data_type not in (TensorProto.INT8, TensorProto.UINT8):
            continue
        values = numpy_helper.to_array(tensor)
        if values.size < LEAST:
            continue
        if values.min() >= -8 and values.max() <= 7 and tensor.data_type == TensorProto.INT8:
            unpacking += _packed(tensor, values, TensorProto.INT4)
        elif values.min() >= 0 and values.max() <= 15:
            unpacking += _packed(tensor, values, TensorProto.UINT4)
        else:
            lowest = _lowest_of_channels(values, read[tensor.name])
            if lowest is not None:
                proto.graph.initializer.append(numpy_helper.from_array(lowest, f"{tensor.name}.lowest"))
                unpacking += _packed(tensor, values - lowest, TensorProto.UINT4, f"{tensor.name}.lowest")
    for node in reversed(unpacking):
        proto.graph.node.insert(0, node)


def stored_arrays(graph: Any) -> dict[str, Array]:
    """The constants of a graph by name; those in 4-bit containers under the name of their 8-bit integers."""
    from onnx import helper, numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if not all(name in stored for name in node.input):
            continue
        if node.op_type == "Cast":
            (to,) = [attribute.i for attribute in node.attribute if attribute.name == "to"]
            stored[node.output[0]] = stored[node.input[0]].astype(helper.tensor_dtype_to_np_dtype(to))
        elif node.op_type == "Add":
            stored[node.output[0]] = stored[node.input[0]] + stored[node.input[1]]
    return stored


def _packed(tensor: Any, values: Array, container: int, added: str = "") -> list[Any]:
    """Store the values in the tensor's place, and return the operators that make its integers of them."""
    from onnx import TensorProto, helper

    kind, name = tensor.data_type, tensor.name
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.raw_data = PACKED.format(name), container, _two_in_a_byte(values)
    tensor.dims.extend(values.shape)
    if not added:
        return [helper.make_node("Cast", [tensor.name], [name], name=f"{name}.unpacked", to=kind)]
    wide, sum_of = f"{name}.wide", f"{name}.sum"
    return [
        helper.make_node("Cast", [tensor.name], [wide], name=wide, to=TensorProto.INT32),
        helper.make_node("Add", [wide, added], [sum_of], name=sum_of),
        helper.make_node("Cast", [sum_of], [name], name=f"{name}.unpacked", to=kind),
    ]


def _lowest_of_channels(values: Array, reader: Any) -> Array | None:
    """The lowest integer of each channel of the reader's scale, if all are at most 15 above it; None if not."""
    axes = [attribute.i for attribute in reader.attribute if attribute.name == "axis"]
    if reader.op_type != "DequantizeLinear" or not axes:
        return None
    others = tuple(axis for axis in range(values.ndim) if axis != axes[0] % values.ndim)
    lowest, highest = (extreme(axis=others, keepdims=True).astype(np.int32) for extreme in (values.min, values.max))
    return lowest if (highest - lowest).max() <= 15 else None


def _two_in_a_byte(values: Array) -> bytes:
    """Pairs of 4-bit integers, the first in the lower half; an odd last one is alone."""
    halves = (values.reshape(-1).astype(np.int16) & 0xF).astype(np.uint8)
    if halves.size % 2:
        halves = np.append(halves, np.uint8(0))
    packed: Array = halves[0::2] | (halves[1::2] << 4)
    return packed.tobytes()
