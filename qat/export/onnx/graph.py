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
