"""In-place writes: operations that write into tensors, and nodes that see it.

The capture gives a tensor that is changed in place a new name (`Lifter`), so a graph mostly reads as if nothing were
written. Views remain: a node may read memory that is written under another name.
"""

import functools
import inspect
import operator
from collections.abc import Callable

import torch
from torch import fx, nn

from qat.graph.nodes import PLAIN_RESULTS, WRITTEN_LATER, join_groups, submodule_of
from qat.graph.operations import calls_where
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.quantizer.registry import estimator_of

PYTHONS_OWN = {operator.and_, operator.or_, operator.not_, operator.is_}
"""Operators that write nothing although their names end like those of torch's in-place methods."""

OWN_MEMORY_MODULES = {f"torch.nn.modules.{name}" for name in (
    "activation", "batchnorm", "conv", "instancenorm", "linear", "normalization", "pooling", "rnn", "sparse",
)}  # fmt: skip
"""Python modules of torch whose layers return new memory, except with `inplace` and except Identity."""

_SHARED = ("move", "split", "dropout", "question")
_OWN = calls_where(lambda row: row.kind not in _SHARED if row.own_memory is None else row.own_memory)
OWN_MEMORY = {name for name in (*(each.__name__ for each in _OWN.functions), *_OWN.methods) if not name.endswith("_")}
"""Functions, methods and operators that return new memory unless they are called with `inplace`."""


def written_by(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the tensor that a node writes into; None if it changes no input."""
    target = node.kwargs.get("out")
    if target is None and _writes_into_first(node, model):
        target = node.args[0] if node.args else node.kwargs.get("input")
    return target if isinstance(target, fx.Node) else None


def drop_unread(graph: fx.Graph, model: nn.Module, keep_modules: bool = False) -> None:
    """Remove nodes whose result no node reads, and writes that no node sees.

    With `keep_modules`, calls of modules stay: a norm counts its inputs and a hook runs even if nothing reads the
    result.
    """
    memory = Memory(model, graph)
    read: set[fx.Node] = set()
    waiting = [
        node for node in graph.nodes if _acts(node, model, memory) or (keep_modules and node.op == "call_module")
    ]
    while waiting:  # backwards from what has an effect
        node = waiting.pop()
        if node not in read:
            read.add(node)
            waiting += [*node.all_input_nodes, *memory.writers(node)]
    for node in reversed(graph.nodes):
        if node not in read:
            graph.erase_node(node)


def _acts(node: fx.Node, model: nn.Module, memory: "Memory") -> bool:  # on something outside the graph
    if written_by(node, model) is not None:
        return memory.is_from_outside(node)
    return node.op != "call_module" and node.is_impure()


def _writes_into_first(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return _is_in_place(str(node.target))
    if node.op != "call_function":
        return False
    if node.target in PYTHONS_OWN:
        return False
    name = getattr(node.target, "__name__", "")
    place = _place_of_inplace(node.target)
    asked = node.kwargs.get("inplace", node.args[place] if place is not None and len(node.args) > place else False)
    return bool(asked) or name == "setitem" or _is_in_place(name)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


@functools.cache
def _place_of_inplace(function: Callable[..., object]) -> int | None:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in
        return None
    return names.index("inplace") if "inplace" in names else None


def _numbers(graph: fx.Graph) -> set[fx.Node]:
    # Sizes, shapes and types of tensors, and what Python computes from these alone.
    found: set[fx.Node] = set()
    for node in graph.nodes:
        name = node.args[1] if node.target is getattr else node.target if node.op == "call_method" else None
        computed = getattr(node.target, "__module__", "") in ("_operator", "math", "builtins")
        inputs = node.all_input_nodes
        if name in PLAIN_RESULTS or (node.op == "call_function" and computed and inputs and found.issuperset(inputs)):
            found.add(node)
    return found


class Memory:
    """Tensors of a graph that may share memory, and the nodes that write there.

    The graph calls submodules of the model. An operation that is not known to return new memory may return the memory
    of any of its inputs.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        # -1: read by no node, and so before every write
        self._last_read = {node: max(map(self.order.__getitem__, node.users), default=-1) for node in self.order}
        self._home: dict[fx.Node, list[fx.Node]] = {node: [node] for node in self.order}
        targets = {node: written_by(node, model) for node in self.order}
        numbers = _numbers(graph)  # a size that reshapes many tensors makes them no views of each other
        for node, target in targets.items():
            if target is not None:
                join_groups(self._home, node, target)
            elif node not in numbers and not has_own_memory(node, model):
                for source in node.all_input_nodes:
                    if source not in numbers:
                        join_groups(self._home, node, source)
        self.written = {node: target for node, target in targets.items() if target is not None}

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write into the memory of a tensor."""
        return [member for member in self._home[node] if member in self.written]

    def readers(self, node: fx.Node) -> set[fx.Node]:
        """Return the nodes that read the memory of a tensor under any name."""
        return {user for member in self._home[node] for user in member.users}

    def is_from_outside(self, node: fx.Node) -> bool:
        """Return True if the memory of a tensor comes from outside the graph."""
        return any(each.op in ("placeholder", "get_attr") for each in self._home[node])

    def seen_writers(self, node: fx.Node) -> list[fx.Node]:
        """Return the writers whose write can be seen under another name of the memory."""
        return [writer for writer in self.writers(node) if not self.is_unseen(writer)]

    def is_unseen(self, writer: fx.Node) -> bool:
        """Return True if no other name of the memory is read later, or seen from outside."""
        now = self.order[writer]
        return not any(
            member.op in ("placeholder", "get_attr") or self.order[member] < now < self._last_read[member]
            for member in self._home[writer]
        )

    def can_wait(self, source: fx.Node, steps: tuple[fx.Node, ...]) -> bool:
        """Return True if steps from a tensor may be computed later, from its later values.

        This holds if no node writes into it after the first step, apart from steps whose writes no node sees.
        """
        first = min(self.order[step] for step in steps) if steps else self.order[source]
        later = [writer for writer in self.writers(source) if self.order[writer] >= first]
        return all(writer in steps and self.is_unseen(writer) for writer in later)


def mark_later_writes(model: fx.GraphModule) -> None:
    """Mark tensors that are written later through a view, and these views."""
    memory = Memory(model, model.graph)
    waiting = [target for writer, target in memory.written.items() if not memory.is_unseen(writer)]
    while waiting:
        node = waiting.pop()
        if WRITTEN_LATER not in node.meta:
            node.meta[WRITTEN_LATER] = True  # a quantized copy would miss the write
            waiting += [] if has_own_memory(node, model) else node.all_input_nodes


def copy_before_writes(model: fx.GraphModule) -> None:
    """Let quantizers read copies of tensors that are written before their backward."""
    memory = Memory(model, model.graph)
    for node in memory.order:
        source = node.args[0] if isinstance(submodule_of(model, node), Quantizer) else None
        if isinstance(source, fx.Node) and any(memory.order[w] > memory.order[node] for w in memory.writers(source)):
            with model.graph.inserting_before(node):
                node.replace_input_with(source, model.graph.call_method("clone", (source,)))


def copy_written_inputs(model: fx.GraphModule) -> None:
    """Let a graph write into copies of its inputs, which a file cannot write."""
    memory = Memory(model, model.graph)
    for node in model.graph.find_nodes(op="placeholder"):
        if memory.writers(node):
            with model.graph.inserting_after(node):
                copied = model.graph.call_method("clone", (node,))
            node.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)
    model.recompile()


def has_own_memory(node: fx.Node, model: nn.Module) -> bool:
    """Return True if the result of a node shares no memory with its inputs."""
    if node.op in ("placeholder", "get_attr", "output"):  # outputs share memory only if they did before
        return True
    if isinstance(node.target, type):  # a result that holds tensors, a ModelOutput: each keeps its own memory
        return True
    module = submodule_of(model, node)
    if module is not None:
        known = type(module).__module__ in OWN_MEMORY_MODULES and not isinstance(module, nn.Identity)
        return known or isinstance(module, QuantLayer) or estimator_of(module) == "lsq"
    name = getattr(node.target, "__name__", node.target)
    home = str(getattr(node.target, "__module__", None)).partition(".")[0]
    of_torch = isinstance(node.target, type(torch.add)) or home in ("torch", "_operator", "builtins")
    # A user's function may bear one of these names.
    return (node.op == "call_method" or of_torch) and name in OWN_MEMORY
