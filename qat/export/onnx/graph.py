"""An ONNX graph: `Edges` answer questions about it; changes that several passes make."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Edges:
    """A graph as it was when it was asked.

    Attributes:
        made: the operator that makes each tensor; inputs and initializers have none.
        read_by: the operators that read each tensor, and a None for an output of the graph, which a user reads.
        stored: the constants, see `stored_arrays`.
    """

    def __init__(self, graph: Any) -> None:
        self.made = {name: node for node in graph.node for name in node.output}
        self.read_by, self.stored = readers(graph), stored_arrays(graph)

    def maker(self, name: str, *kinds: str) -> Any:
        """The operator that makes a tensor, if it is of these kinds."""
        node = self.made.get(name)
        return node if node is not None and node.op_type in kinds else None

    def source(self, name: str, passing: Collection[str]) -> str:
        """The tensor whose values operators of these kinds hand on to this one."""
        while (node := self.maker(name, *passing)) is not None:
            name = node.input[0]
        return name

    def reader(self, name: str) -> Any:
        """The only reader of a tensor, if there is one."""
        return self.read_by[name][0] if len(self.read_by.get(name, ())) == 1 else None

    def pair(self, node: Any) -> list[Array] | None:
        """Operands 1 and 2, a grid or bounds; None if one is missing or computed."""
        names = node.input[1:3]
        return [self.stored[name] for name in names] if len(names) == 2 and set(names) <= self.stored.keys() else None

    def limits(self, node: Any) -> list[Array] | None:
        """The floats between which an operator clips; None if it does not."""
        if node.op_type == "Relu":
            return [np.array(0, np.float32), np.array(np.inf, np.float32)]
        limits = self.pair(node) if node.op_type == "Clip" else None
        return limits if limits is not None and limits[0].dtype == np.float32 else None


def ends_within(limits: Any, grid: Any) -> bool:
    """True if all values of an 8-bit grid lie within limits: clipping changes nothing."""
    ends = np.iinfo(grid[1].dtype)
    low, high = ((level - grid[1].astype(np.float32).max()) * grid[0].max() for level in (ends.min, ends.max))
    return bool(low >= limits[0] and high <= limits[1])


def readers(graph: Any) -> dict[str, list[Any]]:
    """The operators that read each tensor; None for an output, which the user reads."""
    found: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            found.setdefault(name, []).append(node)
    for output in graph.output:
        found.setdefault(output.name, []).append(None)
    return found


def stored_arrays(graph: Any) -> dict[str, Array]:
    """The constants by name; small containers also under the name of their 8-bit integers."""
    from onnx import helper, numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        values = attributes(node)
        if node.op_type == "Constant" and "value" in values:
            stored[node.output[0]] = numpy_helper.to_array(values["value"])
        elif node.op_type == "Constant" and "value_float" in values:
            stored[node.output[0]] = np.array(values["value_float"], np.float32)
        elif node.op_type == "Identity" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]]
        elif node.op_type == "Cast" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]].astype(helper.tensor_dtype_to_np_dtype(values["to"]))
    return stored


def attributes(node: Any) -> dict[str, Any]:
    """The attributes of an operator by name."""
    from onnx import helper

    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def inner_graphs(node: Any) -> list[Any]:
    """The graphs inside an operator: the branches of If, the body of Loop."""
    return [graph for each in node.attribute for graph in ([each.g] if each.HasField("g") else each.graphs)]


def copy_of(node: Any) -> Any:
    """An operator like this one."""
    return type(node).FromString(node.SerializeToString())


def rename_inputs(node: Any, names: Mapping[str, str]) -> None:
    """Let an operator read other tensors, by the names of those that it reads now."""
    node.input[:] = [names.get(name, name) for name in node.input]


def insert(graph: Any, place: int, *nodes: Any) -> None:
    """Put operators in front of the one at this place."""
    for node in reversed(nodes):
        graph.node.insert(place, node)


def store(graph: Any, name: str, values: Any) -> str:
    """Add an initializer, and return its name."""
    from onnx import numpy_helper

    graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def tensor_names(graph: Any) -> set[str]:
    """The names of all tensors of a graph."""
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    return names | {tensor.name for tensor in (*graph.initializer, *graph.input)}


def unused_name(graph: Any, wanted: str) -> str:
    """The name, with underscores behind it while the graph has a tensor of that name."""
    taken = tensor_names(graph)
    while wanted in taken:
        wanted += "_"
    return wanted


def drop_unread(graph: Any) -> None:
    """Remove the operators whose results nothing reads, and then such initializers."""
    read = {output.name for output in graph.output}
    for node in reversed(list(graph.node)):
        if read & set(node.output):
            read |= _read_by(node)
        else:
            graph.node.remove(node)
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _read_by(node: Any) -> set[str]:
    # also what the graphs inside it read, which the outer one feeds
    graphs = inner_graphs(node)
    inner = [_read_by(each) for graph in graphs for each in graph.node]
    return set(node.input).union(*inner, *({output.name for output in graph.output} for graph in graphs))
