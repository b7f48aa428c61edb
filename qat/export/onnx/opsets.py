"""Opsets below those that torch.onnx writes. It imports onnx, which importing qat does not."""

from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, defs, helper

from qat.export.onnx.graph import Array, attributes, insert, store, stored_arrays, unused_name
from qat.export.onnx.operators import TRACED


def lower_opset(proto: ModelProto, opset: int) -> None:
    """Make later operators of a traced graph of older ones; refuse what is not."""
    graph, stored = proto.graph, stored_arrays(proto.graph)
    sizes = {each.name: each.type.tensor_type.shape.dim for each in (*graph.value_info, *graph.output)}
    for node in list(graph.node):
        if node.op_type.startswith("Reduce") and not _fits(node, opset) and set(node.input[1:]) <= stored.keys():
            node.attribute.extend(helper.make_attribute("axes", stored[name].tolist()) for name in node.input[1:])
            del node.input[1:]
        for each in [each for each in node.attribute if each.name == "num_outputs"]:  # of Split: not all are equal
            lengths = [sizes[name][attributes(node).get("axis", 0)].dim_value for name in node.output]
            if all(lengths):
                node.input.append(store(graph, unused_name(graph, f"{node.output[0]}.sizes"), np.array(lengths)))
                node.attribute.remove(each)
        if not _fits(node, opset):
            if not (steps := _older(graph, node)):
                since = next(each for each in range(opset + 1, TRACED + 1) if _fits(node, each))
                raise ValueError(f"export_onnx: {node.op_type} ({node.name}) needs opset {since}, got opset={opset}")
            insert(graph, list(graph.node).index(node), *steps)
            graph.node.remove(node)
    next(entry for entry in proto.opset_import if not entry.domain).version = opset
    proto.ir_version = helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)


def _fits(node: NodeProto, opset: int) -> bool:
    # Drops attributes that the opset does not have yet and that say the default.
    if node.domain or not defs.has(node.op_type, opset):
        return bool(node.domain)
    known, now = (defs.get_schema(node.op_type, each) for each in (opset, TRACED))
    for each in [each for each in node.attribute if each.name not in known.attributes]:
        # allowzero is for tensors without elements; the default of RoiAlign's mode is not what it did before.
        is_default = each == now.attributes[each.name].default_value and each.name != "coordinate_transformation_mode"
        if is_default or each.name == "allowzero":
            node.attribute.remove(each)
    return attributes(node).keys() <= known.attributes.keys() and len(node.input) <= known.max_input


def _older(graph: GraphProto, node: NodeProto) -> list[NodeProto]:
    given, x, y, made = attributes(node), node.input[0], node.output[0], list[NodeProto]()

    def step(kind: str, *inputs: str | Array, **options: Any) -> str:
        names = [x if isinstance(x, str) else store(graph, unused_name(graph, f"{y}.constant"), x) for x in inputs]
        made.append(helper.make_node(kind, names, [f"{y}.{len(made)}"], **options))
        return str(made[-1].output[0])

    if node.op_type == "HardSwish":
        step("Mul", x, step("HardSigmoid", x, alpha=1 / 6, beta=0.5))
    elif node.op_type == "Shape":
        step("Slice", step("Shape", x), np.array([given.get("start", 0)]), np.array([given.get("end", 2**31)]))
    elif node.op_type == "LayerNormalization" and given.get("axis", -1) < 0:
        axes, epsilon = list(range(given.get("axis", -1), 0)), np.array(given.get("epsilon", 1e-5), np.float32)
        centred = step("Sub", x, step("ReduceMean", x, axes=axes))
        variance = step("ReduceMean", step("Mul", centred, centred), axes=axes)
        y_scaled = step("Mul", step("Div", centred, step("Sqrt", step("Add", variance, epsilon))), node.input[1])
        for bias in node.input[2:]:
            step("Add", y_scaled, bias)
    for last in made[-1:]:
        last.name, last.output[0] = node.name, y
    return made
