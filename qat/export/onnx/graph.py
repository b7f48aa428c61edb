"""Questions about an ONNX graph (`Edges`), and changes that several passes make."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # importing qat does not load onnx
    from onnx import GraphProto, NodeProto

Array = npt.NDArray[Any]


class Edges:
    """Lookup tables of a graph. They do not follow later changes of it.

    Attributes:
        made: the operator that makes each tensor; inputs and initializers have none.
        read_by: the operators that read each tensor, and a None for each output of the graph.
        stored: the constants, see `stored_arrays`.
    """

    def __init__(self, graph: GraphProto) -> None:
        self.made = {name: node for node in graph.node for name in node.output}
        self.read_by, self.stored = readers(graph), stored_arrays(graph)

    def maker(self, name: str, *kinds: str) -> NodeProto | None:
        """Return the operator that makes a tensor if it is of these kinds, else None."""
        node = self.made.get(name)
        return node if node is not None and node.op_type in kinds else None

    def source(self, name: str, passing: Collection[str]) -> str:
        """Return the tensor that reaches this one through operators of these kinds alone."""
        while (node := self.maker(name, *passing)) is not None:
            name = node.input[0]
        return name

    def reader(self, name: str) -> NodeProto | None:
        """Return the only reader of a tensor; None if there are several, or the user."""
        return self.read_by[name][0] if len(self.read_by.get(name, ())) == 1 else None

    def pair(self, node: NodeProto) -> list[Array] | None:
        """Return operands 1 and 2, a grid or bounds; None if one is missing or computed."""
        names = node.input[1:3]
        return [self.stored[name] for name in names] if len(names) == 2 and set(names) <= self.stored.keys() else None

    def limits(self, node: NodeProto) -> list[Array] | None:
        """Return the floats between which an operator clips; None if it does not clip."""
        if node.op_type == "Relu":
            return [np.array(0, np.float32), np.array(np.inf, np.float32)]
        limits = self.pair(node) if node.op_type == "Clip" else None
        return limits if limits is not None and limits[0].dtype == np.float32 else None


def ends_within(limits: Sequence[Array], grid: Sequence[Array]) -> bool:
    """Return True if all values of an 8-bit grid lie within limits."""
    ends = np.iinfo(grid[1].dtype)
    low, high = ((level - grid[1].astype(np.float32).max()) * grid[0].max() for level in (ends.min, ends.max))
    return bool(low >= limits[0] and high <= limits[1])


def readers(graph: GraphProto) -> dict[str, list[NodeProto | None]]:
    """Return the readers of each tensor, and a None for an output of the graph."""
    found: dict[str, list[NodeProto | None]] = {}
    for node in graph.node:
        for name in node.input:
            found.setdefault(name, []).append(node)
    for output in graph.output:
        found.setdefault(output.name, []).append(None)
    return found


def stored_arrays(graph: GraphProto) -> dict[str, Array]:
    """Return the constants by name, small containers also as 8-bit integers."""
    from onnx import helper, numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:  # other tools store constants in operators, and share them through Identity
        values = attributes(node)
        if node.op_type == "Constant" and "value" in values:
            stored[node.output[0]] = numpy_helper.to_array(values["value"])
        elif node.op_type == "Constant" and "value_float" in values:
            stored[node.output[0]] = np.array(values["value_float"], np.float32)
        elif node.op_type == "Slice" and len(node.input) == 3 and set(node.input) <= stored.keys():
            bounds = (stored[name].reshape(-1).tolist() for name in node.input[1:])
            stored[node.output[0]] = stored[node.input[0]][tuple(itertools.starmap(slice, zip(*bounds, strict=True)))]
        elif node.op_type == "Identity" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
        elif node.op_type == "Cast" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]].astype(helper.tensor_dtype_to_np_dtype(values["to"]))
    return stored


def attributes(node: NodeProto) -> dict[str, Any]:
    """Return the attributes of an operator by name."""
    from onnx import helper

    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def inner_graphs(node: NodeProto) -> list[GraphProto]:
    """Return the graphs inside an operator: the branches of If, the body of Loop."""
    return [graph for each in node.attribute for graph in ([each.g] if each.HasField("g") else each.graphs)]


def copy_of(node: NodeProto) -> NodeProto:
    """Return a copy of an operator."""
    copy = type(node)()
    copy.CopyFrom(node)
    return copy


def rename_inputs(node: NodeProto, names: Mapping[str, str]) -> None:
    """Replace the tensors that an operator reads, old name to new one."""
    node.input[:] = [names.get(name, name) for name in node.input]


def insert(graph: GraphProto, place: int, *nodes: NodeProto) -> None:
    """Insert operators in front of the one at this place."""
    for node in reversed(nodes):
        graph.node.insert(place, node)


def store(graph: GraphProto, name: str, values: Array) -> str:
    """Add an initializer and return its name."""
    from onnx import numpy_helper

    graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def tensor_names(graph: GraphProto) -> set[str]:
    """Return the names of all tensors of a graph."""
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    return names | {tensor.name for tensor in (*graph.initializer, *graph.input)}


def unused_name(graph: GraphProto, wanted: str) -> str:
    """Return the name, followed by underscores until no tensor of the graph has it."""
    taken = tensor_names(graph)
    while wanted in taken:
        wanted += "_"
    return wanted


def drop_unread(graph: GraphProto) -> None:
    """Remove operators whose results nothing reads, then unread initializers."""
    read = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):  # operators are sorted: each comes after those that it reads
        if read & set(node.output):
            read |= _read_by(node)
        else:
            graph.node.remove(node)
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _read_by(node: NodeProto) -> set[str]:
    graphs = inner_graphs(node)
    # Graphs inside an operator may read tensors of the graph around it.
    inner = [_read_by(each) for graph in graphs for each in graph.node]
    return set(node.input).union(*inner, *({output.name for output in graph.output} for graph in graphs))
