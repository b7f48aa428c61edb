"""Forms of an exported file: QONNX, pixels, small containers; saving."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qat.atomic_write import atomic_write
from qat.export.onnx.graph import Array, Edges, attributes, drop_unread, insert, rename_inputs, store, unused_name

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

QONNX_DOMAIN = "qonnx.custom_op.general"
"""Domain of the operators Quant and BipolarQuant; no runtime for processors has them."""

PIXELS = "pixels"
"""Name of the input of a file that normalises uint8 images (N, H, W, 3) itself."""

READERS = ("DequantizeLinear", "Gather", "GatherND")
"""Operators whose first operand is the stored integers of a weight or a table."""

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


def to_qonnx(proto: ModelProto) -> None:
    """Write every quantizer as a Quant, also of weights, and biases as floats.

    A weight has the fewest bits that hold its integers; one of -1 and 1 alone is a BipolarQuant. Quant adds the zero
    point before it rounds: where that is odd, an exact tie goes to the other neighbour.

    Args:
        proto: an exported file as it was traced; it is changed.
    """
    from onnx import helper

    graph, edges = proto.graph, Edges(proto.graph)
    for node in list(graph.node):
        if node.op_type == "DequantizeLinear" and node.input[0] in edges.stored:
            _constant_as_quant(graph, node, edges.stored)
        elif node.op_type == "DequantizeLinear" and node.input[0] in edges.made:
            _quantizer_as_quant(graph, node, edges)
    drop_unread(graph)
    proto.opset_import.append(helper.make_opsetid(QONNX_DOMAIN, 1))


def _quantizer_as_quant(graph: GraphProto, node: NodeProto, edges: Edges) -> None:
    source = edges.made[node.input[0]]
    clip, quantizer = (source, edges.made.get(source.input[0])) if source.op_type == "Clip" else (None, source)
    if quantizer is None or quantizer.op_type != "QuantizeLinear":
        return
    zero_point = edges.stored[quantizer.input[2]]
    ends = np.iinfo(zero_point.dtype)
    low, high = (ends.min, ends.max) if clip is None else (int(edges.stored[name]) for name in clip.input[1:3])
    bits = (high - low).bit_length()
    narrow = high - low == 2**bits - 2 and bits > 1
    if high - low != 2**bits - 1 - narrow:  # max_magnitude, for example
        raise ValueError(
            f"export_onnx: {quantizer.name!r} has the integers {low} to {high}; QONNX has whole bits alone"
        )
    signed = low != 0 or narrow
    offset = low + 2 ** (bits - 1) - narrow if signed else 0  # of a signed grid with a zero point, stored in uint8
    node.name = quantizer.name
    numbers = {"scale": quantizer.input[1], "zeropt": int(zero_point) - offset, "bitwidth": bits}
    _become_quant(graph, node, quantizer.input[0], numbers, signed=signed, narrow=narrow)


def _constant_as_quant(graph: GraphProto, node: NodeProto, stored: dict[str, Array]) -> None:
    integers, scale = (stored[name] for name in node.input[:2])
    zero = stored[node.input[2]].astype(np.float32) if len(node.input) > 2 else np.zeros_like(scale)
    axis = attributes(node).get("axis", 1)
    shape = [-1 if place == axis else 1 for place in range(integers.ndim)] if scale.ndim else []
    scale, zero = scale.reshape(shape), zero.reshape(shape) if zero.any() else np.zeros(())
    values = ((integers - zero) * scale).astype(np.float32)
    if integers.dtype == np.int32:  # a bias
        store(graph, node.output[0], values)
        graph.node.remove(node)
        return
    x = store(graph, unused_name(graph, node.name or f"{node.output[0]}.values"), values)
    if np.isin(integers, (-1, 1)).all():
        _become_quant(graph, node, x, {"scale": scale})
        return
    low, high, signed = int(integers.min()), int(integers.max()), integers.dtype.kind == "i"
    # One bit is a BipolarQuant's.
    bits = max(2, signed + max(high.bit_length(), (-low - 1).bit_length() if low < 0 else 0))
    narrow = signed and low > -(2 ** (bits - 1))
    numbers = {"scale": scale, "zeropt": zero, "bitwidth": bits}
    _become_quant(graph, node, x, numbers, signed=signed, narrow=narrow)


def _become_quant(
    graph: GraphProto, node: NodeProto, x: str, numbers: Mapping[str, str | float | Array], **kind: bool
) -> None:
    # A scale alone makes a BipolarQuant. The numbers are values, or names of initializers.
    from onnx import helper

    names = [x]
    for key, value in numbers.items():
        if not isinstance(value, str):
            wanted = unused_name(graph, f"{node.name or node.output[0]}.{key}")
            value = store(graph, wanted, np.asarray(value, np.float32))
        names.append(value)
    node.op_type, node.domain, node.input[:] = "Quant" if kind else "BipolarQuant", QONNX_DOMAIN, names
    del node.attribute[:]
    given = {**{key: int(value) for key, value in kind.items()}, "rounding_mode": "ROUND"} if kind else {}
    node.attribute.extend(helper.make_attribute(key, value) for key, value in given.items())


def take_pixels(proto: ModelProto, normalization: tuple[Sequence[float], Sequence[float]]) -> None:
    """Compute (pixel - 255 * mean) / (255 * std) in front of a model of images.

    mean and std are those of pixels in [0, 1]. The file computes in float32 and in the order in which `train.py`
    normalises images, so that every integer behind it is the same.
    """
    from onnx import TensorProto, helper

    try:
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(normalization, np.float64).astype(np.float32) * np.float32(255)
    except (TypeError, ValueError):  # other lengths, or no numbers
        values = np.zeros(0)
    if values.shape != (2, 3) or not np.isfinite(values).all() or not values[1].min() > 0:
        raise ValueError(
            "export_onnx: normalization must be (mean, std), each of 3 finite numbers, std above 0; got"
            f" {normalization!r}"
        )
    (first, *others), graph = proto.graph.input, proto.graph
    axes = list(first.type.tensor_type.shape.dim)
    if others or len(axes) != 4 or axes[1].dim_value != 3:
        raise ValueError(
            f"export_onnx: normalization is for one input of images (N, 3, H, W), the file has"
            f" {', '.join(end.name for end in graph.input)}"
        )
    pixels, as_floats, centred, scaled, normalized = (
        unused_name(graph, name) for name in (PIXELS, "pixels_float", "pixels_centred", "pixels_scaled", "normalized")
    )
    for node in graph.node:
        rename_inputs(node, {first.name: normalized})
    sizes = [each.dim_value or each.dim_param for each in axes]
    graph.input[0].CopyFrom(
        helper.make_tensor_value_info(pixels, TensorProto.UINT8, [sizes[0], sizes[2], sizes[3], sizes[1]])
    )
    names = [unused_name(graph, "pixel_mean"), unused_name(graph, "pixel_std")]
    mean, std = (store(graph, name, row) for name, row in zip(names, values, strict=True))
    steps = [
        helper.make_node("Cast", [pixels], [as_floats], to=TensorProto.FLOAT),
        helper.make_node("Sub", [as_floats, mean], [centred]),
        helper.make_node("Div", [centred, std], [scaled]),
        helper.make_node("Transpose", [scaled], [normalized], perm=[0, 3, 1, 2]),
    ]
    insert(graph, 0, *steps)


def pack_weights(proto: ModelProto, opset: int) -> None:
    """Store few bits in the opset's smallest container, and Cast them to 8 bits.

    A runtime computes constants once, when it loads the file: nothing is slower. Read directly by DequantizeLinear,
    4-bit integers would make ONNX Runtime multiply in float. Of 4 bits with all their levels (-8 to 7), a channel that
    a negative gamma has negated ends at 8: then the layer's integers stay in 8 bits, and those of 2 bits in 4.
    """
    from onnx import TensorProto, helper, numpy_helper

    read = {node.input[0] for node in proto.graph.node if node.op_type in READERS}
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


def store_once(proto: ModelProto) -> None:
    """Store equal tensors of a `PAGE` and more once, as of a layer that is called often.

    Each further one is a Slice of all of the first, which a runtime computes when it loads the file: every reader needs
    a tensor of its own there (`own_initializers`), and of equal operators ONNX Runtime makes one. So each Slice ends
    further behind the last element than the one before.
    """
    from onnx import helper

    graph = proto.graph
    slices: list[NodeProto] = []
    kept: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    for tensor in [tensor for tensor in graph.initializer if len(tensor.raw_data) >= PAGE]:
        name, sizes = tensor.name, tuple(tensor.dims)
        first = kept.setdefault((tensor.data_type, sizes, tensor.raw_data), name)
        if first != name:
            graph.initializer.remove(tensor)
            bounds = {"first": 0, "end": sizes[0] + len(slices)}
            inputs = [store(graph, f"{name}.{key}", np.array([value])) for key, value in bounds.items()]
            slices.append(helper.make_node("Slice", [first, *inputs], [name], name=f"{name}.shared"))
    insert(graph, 0, *slices)


def save(proto: ModelProto, path: Path, notes: dict[str, str]) -> None:
    """Check and write a model atomically; above 2 GB integers go to `<file>.data`.

    Two files cannot be replaced at once. A model of two files is missing for a moment while it is replaced, so that
    nobody reads the old operators with the new integers.
    """
    import onnx
    from onnx.external_data_helper import set_external_data

    onnx.helper.set_model_props(proto, notes)
    # The opset of few bits needs a newer version of the format than torch.onnx writes.
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
