"""From an export of `torch.export` to a graph that calls the model's own modules."""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import Argument

from qat.graph.guards import expect_default, expect_sizes
from qat.graph.leaves import LEAF, TENSOR, LeafCall
from qat.graph.operators import CHECKS, SAME, VMAPPED, called
from qat.graph.side_effects import CaptureError
from qat.inputs import Examples
from qat.torch_internals import GRAPH_CONSTANT, buffers_of, fields_of, pytree, shares_first, writes_to_first

OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that take any number of arguments."""

FIXED = (int, float, complex, str, bool, type(None), torch.dtype, torch.device)

Packing: TypeAlias = Any
"""A value of forward in which a `Slot` stands for each tensor and size, and a `Record` for each dataclass."""

Way = tuple[Any, ...]
"""Steps into a value: an index, a key, or the name of an attribute in a tuple of its own."""


@dataclass(frozen=True)
class Slot:
    """Place of a tensor or size in arguments or results."""

    number: int


@dataclass(frozen=True)
class Record:
    """Class and fields of a dataclass or named tuple, which are no plain containers."""

    kind: type
    values: dict[str, Packing]


def packed(value: Any, slots: list[Any]) -> Packing:
    """Return a value with a `Slot` for each tensor and size, added to `slots`.

    Containers are copied.

    Raises:
        CaptureError: if it holds something else than tensors, plain values, and containers of these.
    """
    if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)):
        slots.append(value)
        return Slot(len(slots) - 1)
    if isinstance(value, (Slot, *FIXED)):
        return value
    if isinstance(value, tuple) and (names := fields_of(value)):
        return Record(type(value), {name: packed(getattr(value, name), slots) for name in names})
    if type(value) in (list, tuple, torch.Size):
        items = [packed(each, slots) for each in value]
        return items if type(value) is list else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        values = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return Record(type(value), {name: packed(each, slots) for name, each in values.items()})
    if isinstance(value, dict):
        by_key = {key: packed(each, slots) for key, each in value.items()}
        return by_key if type(value) is dict else Record(type(value), {"": by_key})
    return value


def unpacked(value: Packing, filled: Callable[[int], object], made: Callable[..., object]) -> Any:
    """Rebuild a value from `filled(slot number)` and `made(kind, args, kwargs)`."""
    if isinstance(value, Slot):
        return filled(value.number)
    if isinstance(value, Record):
        values = {name: unpacked(each, filled, made) for name, each in value.values.items()}
        if is_dataclass(value.kind):
            # A field that is None is left out, as ModelOutputs want it.
            return made(value.kind, (), {name: each for name, each in values.items() if each is not None})
        return made(value.kind, tuple(values.values()), {})
    if type(value) in (list, tuple):
        return type(value)(unpacked(each, filled, made) for each in value)
    return {k: unpacked(each, filled, made) for k, each in value.items()} if type(value) is dict else value


def paths_to(value: Packing, way: Way = ()) -> Iterator[tuple[int, Way]]:
    """Yield the number of each slot, and the way to it."""
    if isinstance(value, Slot):
        yield value.number, way
    elif isinstance(value, Record):
        for name, each in value.values.items():
            yield from paths_to(each, (*way, (name,)) if name else way)
    elif isinstance(value, (list, tuple, dict)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_to(each, (*way, key))


class Lifter:
    """Builds the graph of one mode.

    Whatever depends on constants alone is computed once, in the order of the export, in-place writes included; a node
    that reads it gets a constant of the model.

    Attributes:
        env: each node of the export to what stands for it: a node, the name of an attribute, or several results.
        known: each node of the export that depends on constants alone to its value.
    """

    def __init__(self, model: nn.Module, exported: ExportedProgram, calls: list[LeafCall], prefix: str) -> None:
        self.model, self.exported, self.calls, self.prefix = model, exported, calls, prefix
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.known: dict[fx.Node, Any] = {}
        self.attributes: dict[str, fx.Node] = {}
        self.sizes: dict[str, tuple[fx.Node, int]] = {}  # the first input that has a size, and its axis
        self.first: fx.Node | None = None  # an input that is a tensor: new tensors are made on its device
        self.detached = False
        self.apart: set[fx.Node] = set()  # copies that stay: they or their operands are written

    def lift(
        self, examples: Examples, packing: dict[str, Packing], conditions: Sequence[str], result: Packing
    ) -> fx.Graph:
        """Return the graph: inputs as forward names them, their checks, nodes, result."""
        signature = self.exported.graph_signature
        nodes = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        inputs = []
        for spec in signature.input_specs:
            node = nodes.get(spec.arg.name)
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(node)
            elif node is not None and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                self.env[node] = str(spec.target).removeprefix(self.prefix)
            elif node is not None and spec.kind is InputKind.CONSTANT_TENSOR:
                self.known[node] = self.exported.constants[spec.target].detach()
            else:
                raise CaptureError(f"forward has an input that is a {spec.kind.name.lower()}")
        self._inputs(inputs, examples, packing, conditions)
        self._body(self.exported.graph_module)
        made = [self._value(each) for each in self.exported.graph.output_node().args[0]]
        self.graph.output(unpacked(result, made.__getitem__, self.graph.call_function))
        return self.graph

    def _inputs(
        self, inputs: list[fx.Node | None], examples: Examples, packing: dict[str, Packing], conditions: Sequence[str]
    ) -> None:
        parameters = inspect.signature(self.model.forward).parameters.values()
        defaults: dict[str, object] = {
            each.name: each.default for each in parameters if each.kind not in OPEN or each.name in examples
        }
        stars = {each.name: "*" for each in parameters if each.kind is each.VAR_POSITIONAL and each.name in examples}
        places: dict[str, fx.Node] = {}
        optional = False  # as in Python, every argument behind one with a default has one
        for name in [*defaults, *(name for name in examples if name not in defaults)]:
            default = defaults.get(name)
            optional = name not in stars and (optional or default is not inspect.Parameter.empty)
            standard = [None if default is inspect.Parameter.empty else default] * optional
            places[name] = self.graph.placeholder(stars.get(name, "") + name, None, *standard)
        for name, place in places.items():
            if not any(True for _ in paths_to(packing.get(name))):
                self.graph.call_function(expect_default, (place, examples.get(name, defaults.get(name)), name))
        read = []
        for name, value in packing.items():
            for number, way in paths_to(value):
                source = places[name]
                for step in way:
                    by_name = isinstance(step, tuple)
                    function = getattr if by_name else operator.getitem
                    source = self.graph.call_function(function, (source, step[0] if by_name else step))
                steps = (f".{step[0]}" if isinstance(step, tuple) else f"[{step!r}]" for step in way)
                read.append((number, source, name + "".join(steps)))
        for number, source, _ in read:
            node = inputs[number] if number < len(inputs) else None
            if node is not None:
                self.env[node] = source
                self._describe(source, node)
                for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
                    self.sizes.setdefault(str(size), (source, axis))
            self.first = self.first or source
        if conditions:
            tensors = [source for _, source, _ in sorted(read, key=lambda each: each[0])]
            names = tuple(name for *_, name in sorted(read, key=lambda each: each[0]))
            self.graph.call_function(expect_sizes, (tensors, names, tuple(conditions)))

    def _value(self, argument: Argument) -> Any:
        return fx.node.map_arg(argument, self._node)

    def _node(self, node: fx.Node) -> Packing:
        if node in self.known:
            value = self.known[node]
            if not isinstance(value, Tensor):
                return value
            self.env[node] = self._constant(value)
        found = self.env[node]
        if isinstance(found, str):
            if found not in self.attributes:
                self.attributes[found] = self._describe(self.graph.get_attr(found), node)
            return self.attributes[found]
        return found

    def _constant(self, value: Tensor) -> str:
        held = {name: x for name, x in buffers_of(self.model).items() if name.startswith(GRAPH_CONSTANT)}
        for name, other in held.items():
            same = other is not None and other.dtype == value.dtype and other.shape == value.shape
            if same and torch.equal(other, value):  # type: ignore[arg-type]
                return name
        name = f"{GRAPH_CONSTANT}{len(held)}"
        self.model.register_buffer(name, value.detach().clone(), persistent=False)
        return name

    def _describe(self, mine: fx.Node, node: fx.Node) -> fx.Node:
        # torch.export calls the second call of a module "name@1".
        stack = {key: (str(path).split("@")[0].removeprefix(self.prefix[:-1]).removeprefix("."), kind)
                 for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items()}  # fmt: skip
        mine.meta["nn_module_stack"] = stack
        return mine

    def _body(self, module: fx.GraphModule) -> None:
        self.apart |= self._copies_apart(module.graph)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                part = getattr(module, str(node.target))
                held = self.known if isinstance(part, Tensor) else self.env  # else the graph of a region
                held[node] = part
            elif node.op == "call_function":
                self._call(node)

    def _call(self, node: fx.Node) -> None:
        source: Any = node.args[0] if node.args else None
        target: Any = node.target
        name = getattr(target, "__name__", str(target)).removeprefix("aten.").partition(".")[0]
        drawn = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if name in CHECKS:
            return
        if name in VMAPPED:
            raise CaptureError("forward calls torch.vmap, which a graph does not keep")
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            self._inline(node, name)
        elif target is LEAF:
            self._call_leaf(node)
        elif not drawn and all(each in self.known for each in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: self.known[each])
            self.known[node] = target(*args, **kwargs)
        elif target is operator.getitem and isinstance(self.env.get(source), (list, tuple)):
            self.env[node] = self.env[source][node.args[1]]
        elif name in SAME and node not in self.apart:  # the two tensors need not differ
            self.env[node] = self._node(source)
        elif any(isinstance(self.env.get(each), fx.GraphModule) for each in node.all_input_nodes):
            raise CaptureError(f"forward calls {name}, which a graph of torch.fx does not keep")
        else:
            self._call_operator(node)

    def _copies_apart(self, graph: fx.Graph) -> set[fx.Node]:
        # Calls of `contiguous` that must copy, because their operand or their result is written.
        home: dict[Any, Any] = {}
        written = set()
        for node in graph.nodes:
            source: Any = node.args[0] if node.args else None
            shares = shares_first(node.target) or node.target is operator.getitem
            home[node] = home.get(source, source) if shares else node
            if node.target is LEAF:
                written |= {home.get(node.args[1][place]) for place in self.calls[source].written}
            elif writes_to_first(node.target):
                written.add(home[node])
        return {node for node in home if node.target is torch.ops.aten.contiguous.default and home[node] in written}

    def _call_operator(self, node: fx.Node) -> None:
        if writes_to_first(node.target):
            self._copy_constant(node.args[0])
        args, kwargs = self._value(node.args), dict(self._value(dict(node.kwargs)))
        if node.target is torch.ops.aten.sym_size.int:  # of labels, maybe, which a call may leave out
            args = self.sizes.get(str(node.meta["val"]), args)
        if self.first is not None and any(isinstance(each, torch.device) for each in (*args, *kwargs.values())):
            here = self.graph.call_function(getattr, (self.first, "device"))
            args = tuple(here if isinstance(each, torch.device) else each for each in args)
            kwargs = {key: here if isinstance(each, torch.device) else each for key, each in kwargs.items()}
        operation, target, args, kwargs = called(node, args, kwargs)
        mine = self._describe(self.graph.create_node(operation, target, args, kwargs), node)
        first_of_two = "adaptive_max_pool" in str(node.target)  # F returns the first alone
        self.env[node] = [mine, None] if first_of_two else self._cut(mine, node.meta.get("val"))
        if writes_to_first(node.target):
            self._rename(node.args[0], mine)

    def _cut(self, mine: fx.Node, value: object) -> fx.Node:
        return self.graph.call_method("detach", (mine,)) if self.detached and isinstance(value, Tensor) else mine

    def _rename(self, source: Argument, mine: fx.Node) -> None:
        # After a write, the tensor's name stands for the result: the graph reads as if nothing were written.
        old = self._value(source)
        for key, value in self.env.items():
            if value is old:
                self.env[key] = mine
        for name, value in self.attributes.items():
            if value is old:
                self.attributes[name] = mine

    def _inline(self, node: fx.Node, name: str) -> None:
        by_grad = name == "wrap_with_set_grad_enabled"
        if not by_grad and node.args[1] is not None and node.args[2]:
            raise CaptureError("a part of it runs under autocast, which a graph does not keep")
        place = 1 if by_grad else 4  # of the region among the arguments of torch's operator; its inputs follow
        part: Any = self.env[node.args[place]]  # type: ignore[index]
        inputs = [each for each in part.graph.nodes if each.op == "placeholder"]
        for inner, outer in zip(inputs, node.args[place + 1 :], strict=True):
            self.env[inner] = self._value(outer)
        detached, self.detached = self.detached, by_grad and not node.args[0]  # regions nest
        self._body(part)
        self.detached = detached
        self.env[node] = tuple(self._value(list(part.graph.output_node().args[0])))

    def _copy_constant(self, node: Argument) -> None:
        # It is about to be written, and each call starts from the constant that forward makes.
        if isinstance(node, fx.Node) and node in self.known:
            self.env[node] = self.graph.call_method("clone", (self._node(node),))
            del self.known[node]

    def _call_leaf(self, node: fx.Node) -> None:
        call = self.calls[node.args[0]]  # type: ignore[index]
        for place in call.written:
            self._copy_constant(node.args[1][place])  # type: ignore[index]
        _, tensors, sizes = self._value(node.args)
        args, kwargs = call.arguments(tensors, sizes)
        operation = "call_module" if isinstance(call.target, str) else "call_function"
        mine = self._describe(self.graph.create_node(operation, call.target, args, kwargs), node)
        mine.meta |= call.note
        packing = packed(pytree.tree_unflatten([Slot(i) for i in range(len(call.results))], call.packing), [])
        values: dict[int, fx.Node] = {}
        for place, way in paths_to(packing):
            value = mine
            for step in way:
                value = self.graph.call_function(operator.getitem, (value, step))
            values[place] = value
        tensors_only = [place for place, result in enumerate(call.results) if result is TENSOR]
        self.env[node] = [self._cut(values[place], torch.Tensor()) for place in tensors_only]
        for written in call.written:
            self._rename(node.args[1][written], self.env[node][0])  # type: ignore[index]
