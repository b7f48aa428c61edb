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

    A runtime computes constants once, when it loads the file: nothing is slower. Read directly by DequantizeLinear,
    4-bit integers would make ONNX Runtime multiply in float. 2 bits take 4 too: ONNX has no smaller container that is
    read. Of 4 bits with all their levels (-8 to 7), a channel that a negative gamma has negated ends at 8: then the
    layer's integers stay in 8 bits.
    """
    from onnx import TensorProto, helper, numpy_helper

    read = {node.input[0] for node in proto.graph.node if node.op_type in READERS}
    unpacking: list[Any] = []
    for tensor in list(proto.graph.initializer):
        if tensor.name not in read or tensor.data_type not in (TensorProto.INT8, TensorProto.UINT8):
            continue
        values = numpy_helper.to_array(tensor)
        if values.size < LEAST:
            continue
        kind, name, container = tensor.data_type, tensor.name, None
        if values.min() >= -8 and values.max() <= 7 and kind == TensorProto.INT8:
            container = TensorProto.INT4
        elif values.min() >= 0 and values.max() <= 15:
            container = TensorProto.UINT4
        if container is not None:
            tensor.Clear()
            tensor.name, tensor.data_type, tensor.raw_data = PACKED.format(name), container, _two_in_a_byte(values)
            tensor.dims.extend(values.shape)
            unpacking.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.unpacked", to=kind))
    for node in reversed(unpacking):
        proto.graph.node.insert(0, node)


def stored_arrays(graph: Any) -> dict[str, Array]:
    """The constants of a graph by name; those in 4-bit containers under the name of their 8-bit integers."""
    from onnx import helper, numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] in stored:
            (to,) = [attribute.i for attribute in node.attribute if attribute.name == "to"]
            stored[node.output[0]] = stored[node.input[0]].astype(helper.tensor_dtype_to_np_dtype(to))
    return stored


def _two_in_a_byte(values: Array) -> bytes:
    """Pairs of 4-bit integers, the first in the lower half; an odd last one is alone."""
    halves = np.append(values.reshape(-1), [0] * (values.size % 2)).astype(np.uint8) & 0xF
    packed: Array = halves[0::2] | (halves[1::2] << 4)
    return packed.tobytes()
