"""The format QOperator: operators of integers in place of float ones between dequantization and quantization."""

from typing import Any

import numpy as np

from qat.export.onnx.containers import Array, stored_arrays
from qat.export.onnx.graph import drop_unread, makers, readers, unused_name
from qat.export.onnx.saturation import PASSING
from qat.export.onnxruntime.passes import constants, ends_within, limits_of


def to_qoperator(proto: Any) -> None:
    """Write convolutions between grids as QLinearConv, and products of matrices as MatMulInteger.

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


class Edges:
    """What makes and reads each tensor of a graph, and its constants."""

    def __init__(self, graph: Any) -> None:
        self.made, self.read_by, self.stored = makers(graph), readers(graph), stored_arrays(graph)

    def dequantized(self, name: str, constant: Any = None) -> Any:
        """The DequantizeLinear that makes a tensor, of an activation on one grid or of constants of a type; or None."""
        node = self.made.get(name)
        if node is None or node.op_type != "DequantizeLinear":
            return None
        if node.input[0] in self.stored:
            return node if self.stored[node.input[0]].dtype == constant else None
        grid = constants(node.input[1:3], self.stored)
        return node if constant is None and grid is not None and grid[0].size == 1 else None

    def reader(self, name: str) -> Any:
        """The only reader of a tensor, if there is one."""
        return self.read_by[name][0] if len(self.read_by.get(name, ())) == 1 else None


def _dequantize_later(graph: Any) -> None:
    """Let the operators that only move values move integers, and dequantize behind them."""
    edges = Edges(graph)
    for node in list(graph.node):
        before = edges.dequantized(node.input[0]) if node.op_type in PASSING else None
        if before is not None:
            after = type(node).FromString(before.SerializeToString())
            after.name, after.output[0] = f"{node.output[0]}.dequantized", node.output[0]
            node.input[0], node.output[0] = before.input[0], f"{node.output[0]}.integers"
            after.input[0] = node.output[0]
            graph.node.insert(list(graph.node).index(node) + 1, after)
            edges.made[after.output[0]] = after


def _convolution(node: Any, edges: Edges) -> None:
    """Make the quantizer behind a convolution the QLinearConv of both; a Clip that changes nothing falls away."""
    x, weight = edges.dequantized(node.input[0]), edges.dequantized(node.input[1], np.int8)
    biases = [edges.dequantized(name, np.int32) for name in node.input[2:3]]
    behind = edges.reader(node.output[0])
    limits = limits_of(behind, edges.stored) if behind is not None else None
    quantizer = edges.reader(behind.output[0]) if limits else behind
    if None in (x, weight, quantizer, *biases) or quantizer.op_type != "QuantizeLinear":
        return
    grid = constants(quantizer.input[1:3], edges.stored)
    types = {edges.stored[node.input[2]].dtype for node in (x, quantizer)}  # ONNX Runtime has no kernel for two
    if grid is None or len(types) > 1 or (limits and not ends_within(limits, grid)):
        return
    quantizer.op_type, quantizer.name = "QLinearConv", weight.name
    quantizer.input[:] = [*x.input, *weight.input, *quantizer.input[1:3], *(bias.input[0] for bias in biases)]
    del quantizer.attribute[:]
    quantizer.attribute.extend(node.attribute)


def _matrix_product(graph: Any, node: Any, edges: Edges) -> None:
    """Write a product as MatMulInteger, the Add of its bias in int32, and Mul by the product of both scales."""
    from onnx import TensorProto, helper, numpy_helper

    source, turned = node.input[1], any(each.name == "transB" and each.i for each in node.attribute)
    between = edges.made.get(source)
    if between is not None and between.op_type == "Transpose":
        source, turned = between.input[0], True
    x, other = (edges.dequantized(each) for each in node.input[:2])
    weight = edges.dequantized(source, np.int8)
    behind = edges.reader(node.output[0])
    adding = behind if behind is not None and behind.op_type == "Add" and node.op_type == "MatMul" else node
    bias = next((found for name in adding.input if (found := edges.dequantized(name, np.int32))), None)
    last = node if bias is None else adding
    if x is None or (other is None and weight is None) or (node.op_type == "Gemm" and None in (weight, bias)):
        return
    second = weight if other is None else other
    codes, zeros = second.input[0], [x.input[2], *(second.input[2:3] if other is not None else ())]
    if other is None:
        array: Array = edges.stored[codes]
        codes = unused_name(graph, f"{codes}.columns")  # one for each product, as in `own_initializers`
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array.T if turned else array), codes))
    name = last.output[0]
    factor = edges.stored[x.input[1]] * edges.stored[second.input[1]]
    graph.initializer.append(numpy_helper.from_array(np.asarray(factor, np.float32), f"{name}.factor"))
    steps = [helper.make_node("MatMulInteger", [x.input[0], codes, *zeros], [f"{name}.sums"])]
    if bias is not None:
        steps.append(helper.make_node("Add", [f"{name}.sums", bias.input[0]], [f"{name}.biased"]))
    steps.append(helper.make_node("Cast", [steps[-1].output[0]], [f"{name}.float"], to=TensorProto.FLOAT))
    steps[0].name = f"{weight.name if weight is not None else 'product'} in {name}"
    place = list(graph.node).index(last)
    for step in reversed(steps):
        graph.node.insert(place, step)
    last.op_type = "Mul"
    last.input[:] = [f"{name}.float", f"{name}.factor"]
    del last.attribute[:]
