"""Nodes of a traced graph: facts, notes, free names, and those without inputs."""

import itertools
import operator
import pkgutil
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from qat.torch_internals import name_of

FACTS = "qat_facts"
"""Key of node.meta: `Facts` of the node's tensor for the example inputs; None if it is not a tensor."""

WRITTEN_LATER = "qat_written_later"
"""Key of node.meta: True if a later node writes into the tensor without giving it a new name."""


@dataclass(frozen=True)
class Facts:
    """Facts that tracing learned about a node's tensor."""

    axes: int
    quantizable: bool  # it held finite floating-point numbers; a mask of minus infinity has no range

    @classmethod
    def of(cls, value: object) -> "Facts | None":
        """Return the facts of a tensor, None for anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        floating = value.is_floating_point()
        return cls(value.dim(), floating and (value.is_meta or bool(value.isfinite().all())))


PLAIN_RESULTS = ("size", "dim", "numel", "item", "shape", "ndim", "dtype", "device")
"""Tensor methods and attributes that do not return tensors."""

Written = list[tuple[Any, ...]]
"""A graph as a list that pickles: name, operation, target, arguments, type, scope and our own meta of each node."""


class Reference(str):
    """Name of a node in the arguments of another."""


def written(graph: fx.Graph) -> Written:
    """Return a graph's nodes, from which `read` makes it without running anything."""
    return [
        (
            node.name, node.op, name_of(node.target) if node.op == "call_function" else node.target,
            map_arg((node.args, node.kwargs), lambda each: Reference(each.name)), node.type, scope_of(node),
            {key: value for key, value in node.meta.items() if key.startswith("qat_")},
        )
        for node in graph.nodes
    ]  # fmt: skip


def read(nodes: Written) -> fx.Graph:
    """Return the graph of what `written` returned."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    for name, operation, target, arguments, kind, scope, meta in nodes:
        args, kwargs = map_aggregate(arguments, lambda each: made[each] if type(each) is Reference else each)
        if operation == "call_function":  # it was written by name
            target = pkgutil.resolve_name(target if "." in target else f"builtins.{target}")
        made[name] = node = graph.create_node(operation, target, args, kwargs, name, kind)
        node.meta |= {"nn_module_stack": {"": (scope, nn.Module)}, **meta}
    return graph


def scope_of(node: fx.Node) -> str:
    """Return the path of the module whose forward created this node, "" at the top."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def submodule_of(graph_module: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the module that a call_module node calls, else None."""
    return graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def given_by_name(node: fx.Node, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a call by name, given the names of its positional ones."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def join_groups(group_of: dict[fx.Node, list[fx.Node]], node: fx.Node, other: fx.Node) -> None:
    """Merge the groups of two nodes."""
    mine, theirs = group_of[node], group_of[other]
    if mine is not theirs:
        mine.extend(theirs)
        group_of.update(dict.fromkeys(theirs, mine))


def is_call(
    node: fx.Node, modules: tuple[type[nn.Module], ...], functions: Container[object], methods: Container[object],
    graph_module: fx.GraphModule,
) -> bool:  # fmt: skip
    """Return True if a node calls one of these modules, functions or methods."""
    # By exact types: a subclass may compute something else.
    if node.op == "call_module":
        return type(submodule_of(graph_module, node)) in modules
    if node.op == "call_function":
        return node.target in functions
    return node.op == "call_method" and node.target in methods


def tensor_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that hold floating-point tensors, not sizes, indices or masks."""
    return {node for node in graph.nodes if (facts := node.meta.get(FACTS)) is not None and facts.quantizable}


def dimensions(node: fx.Node) -> int | None:
    """Return the number of axes of a node's tensor; None if it is not known."""
    facts = node.meta.get(FACTS)
    return None if facts is None else int(facts.axes)


def free_name(graph_module: nn.Module, wanted: str) -> str:
    """Return `wanted`, or wanted_1, wanted_2 ... if the name is taken in the model."""
    numbered = (f"{wanted}_{number}" if number else wanted for number in itertools.count())
    return next(name for name in numbered if not _has(graph_module, name))


def _has(module: nn.Module, path: str) -> bool:
    try:
        operator.attrgetter(path)(module)
    except AttributeError:
        return False
    return True


def constant_nodes(graph: fx.Graph, layers: bool = False) -> set[fx.Node]:
    """Return a graph's parameters and buffers, and what is computed from them alone.

    With `layers`, also what layers compute of them: Swin's position bias.
    """
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_module" and not layers:
            # A parametrized weight is the result of a module without arguments.
            computed = not inputs and ".parametrizations." in f".{node.target}"
        else:
            called = node.op == "call_module" or (node.op in ("call_function", "call_method") and bool(inputs))
            computed = called and constant.issuperset(inputs)
        if node.op == "get_attr" or computed:
            constant.add(node)
    return constant


@torch.no_grad()
def constant_values(graph_module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Return the present values of the `constant_nodes`."""
    constant = constant_nodes(graph_module.graph)
    interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)  # its env is the result
    for node in graph_module.graph.nodes:
        if node in constant:
            interpreter.env[node] = interpreter.run_node(node)
    return interpreter.env


def attribute(module: nn.Module, path: str) -> Any:
    """Return the attribute of a module at a path such as `layer1.0.weight`."""
    return operator.attrgetter(path)(module)
