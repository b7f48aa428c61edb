"""Opsets below those that torch.onnx writes: their operators, for older runtimes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from qat.export.onnx.graph import Array, attributes, inner_graphs, store, stored_arrays, unused_name

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

TRACED = 18
"""The first opset that torch.onnx writes."""


def lower_opset(proto: ModelProto, opset: int) -> None:
    """Write the operators of an older opset, in the version of the format of its time.

    Args:
        proto: a graph of opset `TRACED` as torch.onnx returns it, with the shapes of its tensors; it is changed.
        opset: 13 or more.

    Raises:
        ValueError: if an operator is of a later opset and is not made of older ones here.
    """
    from onnx import helper

    _lower(proto.graph, stored_arrays(proto.graph), opset)
    next(entry for entry in proto.opset_import if not entry.domain).version = opset
    proto.ir_version = helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)


def _lower(graph: GraphProto, stored: dict[str, Array], opset: int) -> None:
    from onnx import helper

    sizes = {each.name: each.type.tensor_type.shape.dim for each in (*graph.value_info, *graph.output)}
    nodes: list[NodeProto] = []
    for node in graph.node:
        for inner in inner_graphs(node):
            _lower(inner, stored | stored_arrays(inner), opset)
        if node.op_type.startswith("Reduce") and not _fits(node, opset) and set(node.input[1:2]) <= stored.keys():
            node.attribute.extend(helper.make_attribute("axes", stored[name].tolist()) for name in node.input[1:2])
            del node.input[1:]
        elif node.op_type == "Split" and "num_outputs" in attributes(node):  # before 18 all pieces are of one size
            pieces = [sizes[name][attributes(node).get("axis", 0)] for name in node.output]
            if all(piece.HasField("dim_value") for piece in pieces):
                lengths = np.array([piece.dim_value for piece in pieces])
                node.input.append(store(graph, unused_name(graph, f"{node.output[0]}.sizes"), lengths))
                _drop(node, "num_outputs")
        _drop_defaults(node, opset)
        steps = [node] if _fits(node, opset) else _steps(graph, node)
        for step in steps:
            if not _fits(step, opset):
                needed = next(each for each in range(opset + 1, TRACED + 1) if _fits(node, each))
                raise ValueError(
                    f"export_onnx: {node.op_type} ({node.name}) needs opset {needed}, and is not made of the operators"
                    f" of opset {opset}"
                )
        nodes += steps
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _fits(node: NodeProto, opset: int) -> bool:
    from onnx import defs

    if node.domain or not defs.has(node.op_type, opset):
        return bool(node.domain)
    schema = defs.get_schema(node.op_type, opset)
    return attributes(node).keys() <= schema.attributes.keys() and len(node.input) <= schema.max_input


def _drop(node: NodeProto, name: str) -> None:
    node.attribute.remove(next(each for each in node.attribute if each.name == name))


def _drop_defaults(node: NodeProto, opset: int) -> None:
    # Attributes that the opset does not have yet and whose value says what it does anyway.
    from onnx import defs, helper

    if node.domain or not defs.has(node.op_type, opset):
        return
    known, now = (defs.get_schema(node.op_type, each).attributes for each in (opset, TRACED))
    for name, value in attributes(node).items():
        # RoiAlign's default is not what it did before; allowzero is for tensors without elements.
        if name not in known and name != "coordinate_transformation_mode":
            default = now[name].default_value
            if name == "allowzero" or (default.type and value == helper.get_attribute_value(default)):
                _drop(node, name)


def _steps(graph: GraphProto, node: NodeProto) -> list[NodeProto]:
    # Older operators that compute the same.
    from onnx import helper

    given, (x, *others), y, made = attributes(node), node.input, node.output[0], []

    def step(kind: str, *inputs: str | Array, to: str = "", **options: object) -> str:
        names = [
            each if isinstance(each, str) else store(graph, unused_name(graph, f"{y}.constant"), each)
            for each in inputs
        ]
        made.append(helper.make_node(kind, names, [to or f"{y}.{len(made)}"], name=to and node.name, **options))
        return str(made[-1].output[0])

    if node.op_type == "HardSwish":
        step("Mul", x, step("HardSigmoid", x, alpha=1 / 6, beta=0.5), to=y)
    elif node.op_type == "Mish":
        step("Mul", x, step("Tanh", step("Softplus", x)), to=y)
    elif node.op_type == "Shape":
        ends = [np.array([given.get(name, default)]) for name, default in (("start", 0), ("end", 2**31))]
        step("Slice", step("Shape", x), *ends, to=y)
    elif node.op_type == "LayerNormalization" and given.get("axis", -1) < 0 and len(node.output) == 1:
        axes = list(range(given.get("axis", -1), 0))
        centred = step("Sub", x, step("ReduceMean", x, axes=axes))
        variance = step("ReduceMean", step("Pow", centred, np.float32(2)), axes=axes)
        deviation = step("Sqrt", step("Add", variance, np.float32(given.get("epsilon", 1e-5))))
        scaled = step("Mul", step("Div", centred, deviation), others[0], to="" if others[1:] else y)
        if others[1:]:
            step("Add", scaled, others[1], to=y)
    return made or [node]
