"""The constants of a graph, which it computes from parameters alone: slices of weights, biases with a part zeroed."""

from typing import Any

import torch
from torch import fx, nn


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Parameters, buffers, and everything computed from them alone, in-place changes of these results included."""
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        computed = node.op in ("call_function", "call_method") and bool(inputs) and constant.issuperset(inputs)
        # A parametrized weight is the result of a module without arguments.
        parametrized = node.op == "call_module" and not inputs and ".parametrizations." in f".{node.target}"
        if node.op == "get_attr" or computed or parametrized:
            constant.add(node)
    return constant


@torch.no_grad()
def constant_values(graph_module: fx.GraphModule) -> dict[fx.Node, Any]:
    """The present values of the `constant_nodes`."""
    constant = constant_nodes(graph_module.graph)
    values: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node not in constant:
            continue
        if node.op == "get_attr":
            values[node] = attribute(graph_module, str(node.target))
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: values[argument])
        if node.op == "call_module":
            values[node] = graph_module.get_submodule(str(node.target))()
        elif node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            values[node] = node.target(*args, **kwargs)
    return values


def fixed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no input of the model, layers and quantizers included: Swin's position bias."""
    fixed: set[fx.Node] = set()
    for node in graph.nodes:
        computed = node.op in ("call_function", "call_method", "call_module") and fixed.issuperset(node.all_input_nodes)
        if node.op == "get_attr" or (computed and (node.all_input_nodes or node.op == "call_module")):
            fixed.add(node)
    return fixed


def attribute(module: nn.Module, path: str) -> Any:
    """The attribute of a module at a path such as `layer1.0.weight`."""
    found: Any = module
    for step in path.split("."):
        found = getattr(found, step)
    return found
