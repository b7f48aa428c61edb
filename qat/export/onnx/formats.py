"""Other forms of an exported file: QOperator, QONNX for FPGAs, uint8 pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qat.export.onnx.graph import (
    Array,
    Edges,
    attributes,
    copy_of,
    drop_unread,
    ends_within,
    insert,
    rename_inputs,
    store,
    unused_name,
)
from qat.export.onnx.saturation import PASSING

if TYPE_CHECKING:
    import numpy.typing as npt
    from onnx import GraphProto, ModelProto, NodeProto

QONNX_DOMAIN = "qonnx.custom_op.general"
"""Domain of the operators Quant and BipolarQuant; no runtime for processors has them."""

PIXELS = "pixels"
"""Name of the input of a file that normalises uint8 images (N, H, W, 3) itself."""


def to_qoperator(proto: ModelProto) -> None:
    """Write convolutions as QLinearConv, and products of matrices as MatMulInteger.

    The standard has no others: sums, averages and curves stay between DequantizeLinear and QuantizeLinear, and so do
    convolutions whose result no quantizer reads, or one of another type than their input's. A product of matrices adds
    its int32 bias to integers, and becomes float by one factor for each column. QLinearMatMul has none.

    Args:
        proto: an exported file, before its weights are packed; it is changed.
    """
    graph = proto.graph
    _dequantize_later(graph)
    edges = Edges(graph)
    for node in list(graph.node):
        if node.op_type == "Conv":
            _convolution(node, edges)
        elif node.op_type in ("MatMul", "Gemm"):
            _matrix_product(graph, node, edges)
    drop_unread(graph)


def _dequantized(name: str, edges: Edges, constant: npt.DTypeLike | None = None) -> NodeProto | None:
    # The DequantizeLinear that makes a tensor: of constants of this type, or of an activation with a single scale.
    node = edges.maker(name, "DequantizeLinear")
    if node is None:
        return None
    if node.input[0] in edges.stored:
        return node if edges.stored[node.input[0]].dtype == constant else None
    grid = edges.pair(node)
    return node if constant is None and grid is not None and grid[0].size == 1 else None


def _dequantize_later(graph: GraphProto) -> None:
    # QLinearConv reads integers: a DequantizeLinear in front of operators that only move values goes behind them.
    edges = Edges(graph)
    for node in list(graph.node):
        before = _dequantized(node.input[0], edges) if node.op_type in PASSING else None
        if before is not None:
            after = copy_of(before)
            after.name, after.output[0] = f"{node.output[0]}.dequantized", node.output[0]
            node.input[0], node.output[0] = before.input[0], f"{node.output[0]}.integers"
            after.input[0] = node.output[0]
            insert(graph, list(graph.node).index(node) + 1, after)
            edges.made[after.output[0]] = after


def _convolution(node: NodeProto, edges: Edges) -> None:
    # The quantizer behind a convolution becomes the QLinearConv of both; a Clip that changes nothing falls away.
    x, weight = _dequantized(node.input[0], edges), _dequantized(node.input[1], edges, np.int8)
    biases = [_dequantized(name, edges, np.int32) for name in node.input[2:3]]
    behind = edges.reader(node.output[0])
    limits = edges.limits(behind) if behind is not None else None
    quantizer = edges.reader(behind.output[0]) if behind is not None and limits else behind
    if x is None or weight is None or None in biases or quantizer is None or quantizer.op_type != "QuantizeLinear":
        return
    grid = edges.pair(quantizer)
    types = {edges.stored[node.input[2]].dtype for node in (x, quantizer)}  # ONNX Runtime has no kernel for two
    if grid is None or len(types) > 1 or (limits and not ends_within(limits, grid)):
        return
    quantizer.op_type, quantizer.name = "QLinearConv", weight.name
    quantizer.input[:] = [*x.input, *weight.input, *quantizer.input[1:3], *(bias.input[0] for bias in biases if bias)]
    del quantizer.attribute[:]
    quantizer.attribute.extend(node.attribute)


def _matrix_product(graph: GraphProto, node: NodeProto, edges: Edges) -> None:
    # It becomes MatMulInteger, the Add of its bias in int32, and a Mul by the product of both scales.
    from onnx import TensorProto, helper

    source, turned = node.input[1], bool(attributes(node).get("transB"))
    if (between := edges.maker(source, "Transpose")) is not None:
        source, turned = between.input[0], True
    x, other = (_dequantized(each, edges) for each in node.input[:2])
    weight = _dequantized(source, edges, np.int8)
    behind = edges.reader(node.output[0])
    adding = behind if behind is not None and behind.op_type == "Add" and node.op_type == "MatMul" else node
    bias = next((found for name in adding.input if (found := _dequantized(name, edges, np.int32))), None)
    last = node if bias is None else adding
    if x is None or (other is None and weight is None) or (node.op_type == "Gemm" and None in (weight, bias)):
        return
    second = other or weight
    assert second is not None
    codes, zeros = second.input[0], [x.input[2], *(second.input[2:3] if other is not None else ())]
    if other is None:
        array: Array = edges.stored[codes]
        codes = unused_name(graph, f"{codes}.columns")  # one for each product, as in `own_initializers`
        store(graph, codes, np.ascontiguousarray(array.T if turned else array))
    name = last.output[0]
    factor = np.asarray(edges.stored[x.input[1]] * edges.stored[second.input[1]], np.float32)
    steps = [helper.make_node("MatMulInteger", [x.input[0], codes, *zeros], [f"{name}.sums"])]
    if bias is not None:
        steps.append(helper.make_node("Add", [f"{name}.sums", bias.input[0]], [f"{name}.biased"]))
    steps.append(helper.make_node("Cast", [steps[-1].output[0]], [f"{name}.float"], to=TensorProto.FLOAT))
    steps[0].name = f"{weight.name if weight is not None else 'product'} in {name}"
    insert(graph, list(graph.node).index(last), *steps)
    last.op_type = "Mul"
    last.input[:] = [f"{name}.float", store(graph, f"{name}.factor", factor)]
    del last.attribute[:]


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
    if high - low != 2**bits - 1 - narrow:
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
    low, high, signed = int(integers.min()), int(integers.max()), integers.dtype == np.int8
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
