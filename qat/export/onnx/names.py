"""Names of the model in an ONNX file; an initializer for each reader of a weight."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from qat.export.onnx.graph import copy_of, inner_graphs, readers, rename_inputs, tensor_names
from qat.export.onnx.operators import LAYER, QUANTIZER
from qat.integers.evaluation import numbered

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

CODES, ZERO_POINT = 0, 2
"""Operands of DequantizeLinear."""


def name_quantizers(proto: ModelProto, expected: Mapping[str, tuple[float, ...]]) -> None:
    """Name every QuantizeLinear and its integers after the quantizer.

    Further calls are numbered. Two quantizers with the same grid on the same tensor become one operator, with the name
    of one of them.
    """
    read_by = readers(proto.graph)
    seen: Counter[str] = Counter()
    for node in proto.graph.node:
        name = _metadata(node, QUANTIZER)
        if name is None:
            continue
        # compare_layers reads the last integers of a quantizer: of QuantizeLinear, or of the Clip behind it.
        last = next((each for each in read_by.get(node.output[0], []) if each and each.op_type == "Clip"), node)
        new = numbered(name, seen)
        for reader in read_by.get(last.output[0], []):
            if reader is not None:
                rename_inputs(reader, {last.output[0]: new})
        last.output[0] = node.name = new
    # A quantizer that the exporter merged with an equal one is present under the other name.
    present = {expected[name] for name in seen}
    missing = sorted(name for name, grid in expected.items() if name not in seen and grid not in present)
    if missing:
        raise ValueError(
            f"export_onnx: {len(missing)} of the model's {len(expected)} quantizers are not in the ONNX graph:"
            f" {', '.join(missing[:5])}"
        )


def name_weights(proto: ModelProto) -> None:
    """Name every weight's DequantizeLinear `<layer>.weight`; number further calls."""
    seen: Counter[str] = Counter()
    for node in proto.graph.node:
        layer = _metadata(node, LAYER)
        if layer is not None:
            node.name = numbered(f"{layer}.weight", seen)


def own_initializers(proto: ModelProto) -> None:
    """Give every reader of a weight its own DequantizeLinear, integers and zero point.

    The exporter stores equal tensors once and computes equal nodes once. With `session.x64quantprecision=1` ONNX
    Runtime converts every weight to uint8, and names the result after the initializer that it converts. Where two
    weights share an initializer, the second one cannot be converted, and ONNX Runtime refuses the file ("Attempt to
    replace the existing tensor"). `store_once` makes large ones small again.
    """
    stored = {tensor.name for tensor in proto.graph.initializer}
    taken: set[str] = set()
    nodes = []
    for node in proto.graph.node:
        nodes.append(node)
        if node.op_type != "DequantizeLinear" or node.input[0] not in stored:
            continue
        copies = _one_for_each_reader(proto, node)
        nodes += copies[1:]
        for copy in copies:
            for place in (CODES, ZERO_POINT):
                if place < len(copy.input):
                    copy.input[place] = _own(proto, copy.input[place], taken)
    ordered = [copy_of(node) for node in nodes]  # clearing the field frees the operators in it
    del proto.graph.node[:]
    proto.graph.node.extend(ordered)


def _one_for_each_reader(proto: ModelProto, node: NodeProto) -> list[NodeProto]:
    reading = [reader for reader in proto.graph.node if node.output[0] in reader.input]
    copies = [node]
    for number, reader in enumerate(reading[1:], 1):
        copy = copy_of(node)
        copy.name, copy.output[0] = f"{node.name}.{number}", f"{node.output[0]}.{number}"
        rename_inputs(reader, {node.output[0]: copy.output[0]})
        copies.append(copy)
    return copies


def _own(proto: ModelProto, name: str, taken: set[str]) -> str:
    own = name  # the first reader keeps the initializer itself
    if name in taken:
        own = next(each for number in itertools.count(1) if (each := f"{name}.{number}") not in taken)
        copy = proto.graph.initializer.add()
        copy.CopyFrom(next(tensor for tensor in proto.graph.initializer if tensor.name == name))
        copy.name = own
    taken.add(own)
    return own


def rename_inputs_outputs(proto: ModelProto, inputs: Sequence[str] | None, outputs: Sequence[str] | None) -> None:
    """Rename the inputs and outputs of a file, in their order."""
    graph = proto.graph
    new: dict[str, str] = {}
    for what, ends, names in (("input", graph.input, inputs), ("output", graph.output, outputs)):
        if names is None:
            continue
        if len(names) != len(ends):
            raise ValueError(
                f"export_onnx: {what}_names: {len(names)} ({', '.join(names)}) for {len(ends)} {what}s"
                f" ({', '.join(end.name for end in ends)})"
            )
        new |= {end.name: name for end, name in zip(ends, names, strict=True)}
    taken = tensor_names(graph) - set(new) | {tensor.name for tensor in graph.initializer}
    for name in new.values():
        if not name or name in taken or list(new.values()).count(name) > 1:
            why = "is taken by another tensor of the file" if name in taken else "is empty, or given twice"
            raise ValueError(f"export_onnx: the name {name!r} {why}; choose another")
    for end in (*graph.input, *graph.output):
        end.name = new.get(end.name, end.name)
    for node in graph.node:
        rename_inputs(node, new)
        node.output[:] = [new.get(name, name) for name in node.output]


def strip_traces(graph: GraphProto) -> None:
    """Drop the exporter's stack traces, which name paths and outweigh the operators.

    Graphs inside operators, such as the bodies of loops, lose theirs too.
    """
    del graph.metadata_props[:]
    del graph.value_info[:]
    for part in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for node in graph.node:
        for inner in inner_graphs(node):
            strip_traces(inner)


def _metadata(node: NodeProto, key: str) -> str | None:
    return next((entry.value for entry in node.metadata_props if entry.key == key), None)
