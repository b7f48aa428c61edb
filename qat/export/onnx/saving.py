"""An ONNX file on the disk: small containers, and a second file above 2 GB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qat.atomic_write import atomic_write
from qat.export.onnx.graph import Array, insert

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

READERS = {"DequantizeLinear": 0, "Gather": 0, "GatherND": 0, "QLinearConv": 3, "MatMulInteger": 1}
"""Operators that read the stored integers of a weight or a table, and the operand that reads them."""

PACKED = "{}.packed"
"""Name of an initializer in a smaller container; behind the Cast the integers keep their name."""

SINCE = {2: 25, 4: 21}
"""Bits of a container to the opset that brought it."""

LEAST = 64
"""Least elements for which a container of fewer bits is worth an operator."""

MOST_BYTES = 2**31 - 2**26
"""Most bytes of initializers in one file: protobuf reads 2 GB at most, and the operators need some of them."""

LEAST_BYTES, PAGE = 1024, 4096
"""Initializers from so many bytes on go to the second file; each begins at a page, which a runtime can map."""


def pack_weights(proto: ModelProto, opset: int) -> None:
    """Store few bits in the opset's smallest container, and Cast them to 8 bits.

    A runtime computes constants once, when it loads the file: nothing is slower. Read directly by DequantizeLinear,
    4-bit integers would make ONNX Runtime multiply in float. Of 4 bits with all their levels (-8 to 7), a channel that
    a negative gamma has negated ends at 8: then the layer's integers stay in 8 bits, and those of 2 bits in 4.
    """
    from onnx import TensorProto, helper, numpy_helper

    read = {node.input[READERS[node.op_type]] for node in proto.graph.node if node.op_type in READERS}
    unpacking: list[NodeProto] = []
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
    insert(proto.graph, 0, *unpacking)


def _container(values: Array, widths: list[int]) -> tuple[int, bool]:
    # The fewest bits that hold all values (0 if none do), and whether as signed integers.
    for bits in widths:
        for low in (-(2 ** (bits - 1)), 0) if values.dtype == np.int8 else (0,):
            if low <= values.min() and values.max() < low + 2**bits:
                return bits, low < 0
    return 0, False


def _in_bytes(values: Array, bits: int) -> bytes:
    # ONNX: the first integer lies in a byte's lowest bits, and the last byte is filled with zeros.
    count = 8 // bits
    rows = np.append(values.reshape(-1), [0] * (-values.size % count)).astype(np.uint8).reshape(-1, count)
    packed = (rows & (2**bits - 1)) << np.arange(0, 8, bits, dtype=np.uint8)
    return bytes(np.bitwise_or.reduce(packed, axis=1).tobytes())


def save(proto: ModelProto, path: Path, notes: dict[str, str]) -> None:
    """Check and write a model atomically; above 2 GB integers go to `<file>.data`.

    Two files cannot be replaced at once. A model of two files is missing for a moment while it is replaced, so that
    nobody reads the old operators with the new integers.
    """
    import onnx
    from onnx.external_data_helper import set_external_data

    onnx.helper.set_model_props(proto, notes)
    needed = onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, needed)
    large = [tensor for tensor in proto.graph.initializer if len(tensor.raw_data) >= LEAST_BYTES]
    if sum(len(tensor.raw_data) for tensor in large) > MOST_BYTES:
        data = path.with_name(f"{path.name}.data")
        with atomic_write(data) as temporary, open(temporary, "wb") as file:
            for tensor in large:
                start = file.seek(-(-file.tell() // PAGE) * PAGE)
                set_external_data(tensor, data.name, start, file.write(tensor.raw_data))
                tensor.ClearField("raw_data")
            if data.exists():
                path.unlink(missing_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(proto.SerializeToString())
        onnx.checker.check_model(str(temporary))


def as_json(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return each value as JSON."""
    notes = {}
    for key, value in metadata.items():
        try:
            notes[key] = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"export_onnx: metadata[{key!r}] cannot be written as JSON ({error})") from None
    return notes
