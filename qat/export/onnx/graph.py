"""The edges of an ONNX graph: which operator makes a tensor, and which ones read it."""

from typing import Any


def makers(graph: Any) -> dict[str, Any]:
    """The operator that makes each tensor; inputs and initializers have none."""
    return {name: node for node in graph.node for name in node.output}


def readers(graph: Any) -> dict[str, list[Any]]:
    """The operators that read each tensor, and a None for an output of the graph, which a user reads."""
    found: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            found.setdefault(name, []).append(node)
    for output in graph.output:
        found.setdefault(output.name, []).append(None)
    return found


def unused_name(graph: Any, wanted: str) -> str:
    """The name, with underscores behind it while the graph has a tensor of that name."""
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {tensor.name for tensor in (*graph.initializer, *graph.input)}
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
    """What an operator reads, itself or in the graphs inside it."""
    graphs = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    inner = [_read_by(each) for graph in graphs for each in graph.node]
    return set(node.input).union(*inner, *({output.name for output in graph.output} for graph in graphs))
