"""The nodes of a traced graph: facts about them, their notes, free names, and what depends on parameters alone."""

import operator
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg

from qat.torch_internals import name_of

FACTS = "qat_facts"
"""Key of node.meta: `Facts` of the node's tensor for the example inputs; None if it is not a tensor."""

WRITTEN_LATER = "qat_written_later"
"""Key of node.meta: true if a later node writes into the tensor without giving it a new name."""


@dataclass(frozen=True)
class Facts:
    """What tracing learned about a node's tensor."""

    axes: int
    quantizable: bool  # whether it held finite floating-point numbers; a mask of minus infinity has no range

    @classmethod
    def of(cls, value: Any) -> "Facts | None":
        """The facts of a tensor, None for anything else."""
        if not isinstance(value, torch.Tensor):
            return None
        floating = value.is_floating_point()
        return cls(value.dim(), floating and (value.is_meta or bool(value.isfinite().all())))


PLAIN_RESULTS = ("size", "dim", "numel", "item", "shape", "ndim", "dtype", "device")
"""Tensor methods and attributes that do not return tensors."""

Written = list[tuple[Any, ...]]
"""A graph as a list that pickles: name, operation, target, arguments, type, scope and our own meta of each node."""


class Reference(str):
    """The name of a node in the arguments of another."""


def written(graph: fx.Graph) -> Written:
    """The nodes of a graph, which `read` makes again without running anything."""
    return [
        (
            node.name, node.op, name_of(node.target) if node.op == "call_function" else node.target,
            map_arg((node.args, node.kwargs), lambda each: Reference(each.name)), node.type, scope_of(node),
            {key: value for key, value in node.meta.items() if key.startswith("qat_")},
        )
        for node in graph.nodes
    ]  # fmt: skip


def read(nodes: Written) -> fx.Graph:
    """The graph of what `written` returned."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    for name, operation, target, arguments, kind, scope, meta in nodes:
        args, kwargs = map_aggregate(arguments, lambda each: made[each] if type(each) is Reference else each)
        if operation == "call_function":
            target = pkgutil.resolve_name(target if "." in target else f"builtins.{target}")
        made[name] = node = graph.create_node(operation, target, args, kwargs, name, kind)
        node.meta |= {"nn_module_stack": {"": (scope, nn.Module)}, **meta}
    return graph


def scope_of(node: fx.Node) -> str:
    """Path of the module whose forward created this node, "" at the top."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def submodule_of(graph_module: nn.Module, node: fx.Node) -> nn.Module | None:
    """The module that a call_module node calls, else None."""
    return graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def given_by_name(node: fx.Node, names: Iterable[str]) -> dict[str, Any]:
    """The arguments that a call gives, by the names of its positional ones."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def join_groups(group_of: dict[fx.Node, list[fx.Node]], node: fx.Node, other: fx.Node) -> None:
    """Make one group of the groups of two nodes."""
    mine, theirs = group_of[node], group_of[other]
    if mine is not theirs:
        mine.extend(theirs)
        group_of.update(dict.fromkeys(theirs, mine))


def is_call(node: fx.Node, modules: tuple[type[nn.Module], ...], functions: set[Any], methods: set[str],
            graph_module: fx.GraphModule) -> bool:  # fmt: skip
    """Whether a node calls one of these modules (exact types), functions or tensor methods."""
    if node.op == "call_module":
        return type(submodule_of(graph_module, node)) in modules
    if node.op == "call_function":
        return node.target in functions
    return node.op == "call_method" and node.target in methods


def tensor_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that hold floating-point tensors, and not sizes, indices or masks."""
    return {node for node in graph.nodes if (facts := node.meta.get(FACTS)) is not None and facts.quantizable}


def dimensions(node: fx.Node) -> int | None:
    """The number of axes of the node's tensor for the example inputs; None if it is not known."""
    facts = node.meta.get(FACTS)
    return None if facts is None else int(facts.axes)


def free_name(graph_module: nn.Module, wanted: str) -> str:
    """`wanted`, or wanted_1, wanted_2 ... if the name is taken in the model."""
    candidate, number = wanted, 0
    while _has(graph_module, candidate):
        number += 1
        candidate = f"{wanted}_{number}"
    return candidate


def _has(module: nn.Module, path: str) -> bool:
    try:
        operator.attrgetter(path)(module)
    except AttributeError:
        return False
    return True


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The constants of a graph: parameters, buffers, and what is computed from them alone, in place or not."""
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
