"""The constants of a graph, which it computes from parameters alone: slices of weights, biases with a part zeroed."""

import operator
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
    interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)
    for node in graph_module.graph.nodes:
        if node in constant:
            interpreter.env[node] = interpreter.run_node(node)
    return interpreter.env


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
    return operator.attrgetter(path)(module)
