"""The graph that evaluation computes on uint8 codes, and the same in fewer passes.

It is derived from an `evaluation_copy`. Where a layer reads a tensor that lies on the grid of a quantizer, it reads its
codes; where a quantizer follows a layer, a sum, or a function of one value, both become one step. Everything else
computes in float between `Dequantize` and `Quantize`, as the model does.
"""

import copy
import operator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from qat.codes.evaluation.arithmetic import CodeGrid, all_values, code_grid_of, has_codes
from qat.codes.evaluation.modules import AsGiven, Dequantize, Join, MaxPool, Quantize, Table
from qat.codes.evaluation.products import Product, geometry_of
from qat.codes.operators.grid import SHIFT
from qat.graph.in_place import Memory, drop_unread
from qat.graph.nodes import FACTS, constant_values, given_by_name, is_call, submodule_of
from qat.graph.operations import AVERAGING, DROPOUTS, JOINING, NONLINEAR, by_name, calls_of
from qat.integers.evaluation import call_names
from qat.integers.freezing import argument_of, integers_of
from qat.integers.movement import asks_for_shape, window
from qat.kernels.cpu.quantizers import NO_CLIP
from qat.layers import QuantEmbedding, QuantLayer
from qat.preparation.operations import grid_of, is_relu, is_split, operation_of, passes_grid

MOVES, CURVES, NORMS = calls_of("move", "split"), by_name("curve"), by_name("norm")

QUANTIZER = "qat_integers_of"
"""Key of node.meta in a program: the quantizer call whose codes the node computes."""


def integer_program(model: fx.GraphModule) -> fx.GraphModule | None:
    """Return the program of an `evaluation_copy`, or None if no layer takes codes."""
    writer = Writer(model)
    if not writer.layers or any(map(writer.memory.seen_writers, model.graph.nodes)):
        return None
    return writer.program()


class Chain(NamedTuple):
    """A quantizer and what it follows.

    Attributes:
        kind: what computes them: a layer, a sum or product, a table, a table for each tensor of a concatenation,
            or the quantizer alone from floats.
        start: the layer, the sum, product or concatenation; of a table and of floats what they read.
        steps: the nodes that the program leaves out.
        clip: floor and ceiling before the quantizer.
    """

    kind: Literal["layer", "join", "table", "cat", "floats"]
    start: fx.Node
    steps: tuple[fx.Node, ...] = ()
    clip: tuple[float, float] = NO_CLIP


class Writer:
    """Copies a graph node by node; a tensor on a grid has codes, floats or both."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model, self.graph = model, fx.Graph()
        self.named: dict[str, object] = {}  # what the nodes of the program name
        self.names, self.values = call_names(model), constant_values(model)
        self.memory = Memory(model, model.graph)
        quantizers = {node: submodule_of(model, node) for node in self.names}
        self.grids = {node: code_grid_of(each) for node, each in quantizers.items() if has_codes(each)}
        self.layers = {node for node in model.graph.nodes if self._takes_codes(node)}
        self.chains = {node: self._chain(node) for node in self.grids}
        self.absorbed = {step for chain in self.chains.values() for step in chain.steps}
        self.codes: dict[fx.Node, fx.Node] = {}
        self.floats: dict[fx.Node, fx.Node] = {}

    def program(self) -> fx.GraphModule:
        """Return the whole graph."""
        for node in self.model.graph.nodes:
            if node in self.absorbed:
                continue
            if node in self.grids:
                self.codes[node] = self._quantized(node)
                self.codes[node].meta[QUANTIZER] = self.names[node]
            elif node in self.layers:
                self.floats[node] = self._product(node)
            elif self._moves_codes(node):
                self.codes[node] = self._moved(node)
            else:
                self.floats[node] = self._copied(node)
        self.graph.lint()
        program = fx.GraphModule(self.named, self.graph)
        drop_unread(program.graph, program)
        return fx.GraphModule(program, program.graph)  # it takes what is named alone, and changes no shared module

    def _grid(self, node: object) -> fx.Node | None:
        # Of a tensor, or of what splits one: the pieces lie on its grid.
        if not isinstance(node, fx.Node) or (node.meta.get(FACTS, ()) is None and not is_split(node, self.model)):
            return None
        found = grid_of(node, self.model)
        return found if found in self.grids else None

    def _takes_codes(self, node: fx.Node) -> bool:
        layer = submodule_of(self.model, node)
        if not isinstance(layer, QuantLayer) or isinstance(layer, QuantEmbedding) or geometry_of(layer) is None:
            return False
        quantizer, grid = argument_of(node, "input_quantizer", self.values), self._grid(node.args[0])
        if grid is None or submodule_of(self.model, grid) is not quantizer or not layer.weight_quantizer.has_integers:
            return False
        return layer.input_quantizer in (None, quantizer) and all(x in self.values for x in node.all_input_nodes[1:])

    # ---- nodes ----

    def _call(self, module: nn.Module, *inputs: fx.Node) -> fx.Node:
        name = f"step_{len(self.graph.nodes)}"
        self.named[name] = module
        return self.graph.call_module(name, inputs)

    def _float(self, node: fx.Node) -> fx.Node:
        if node not in self.floats:
            grid = self._grid(node)
            assert grid is not None
            self.floats[node] = self._call(Dequantize(self.grids[grid]), self.codes[node])
        return self.floats[node]

    def _coded(self, node: fx.Node) -> fx.Node:
        if node not in self.codes:
            grid = self._grid(node)
            assert grid is not None
            self.codes[node] = self._call(Quantize(self.grids[grid]), self._float(node))
        return self.codes[node]

    def _copied(self, node: fx.Node) -> fx.Node:
        if node.op in ("call_module", "get_attr"):
            self.named[str(node.target)] = operator.attrgetter(str(node.target))(self.model)
        read = self._float
        if asks_for_shape(node) and node.args[1:] != ("dtype",):  # codes are bytes
            read = self._shape
        elif operation_of(node, self.model, AVERAGING) or operation_of(node, self.model, NONLINEAR) in NORMS:
            read = partial(self._as_given, given_by_name(node, ("input",)).get("input"))
        copy = self.graph.node_copy(node, read)
        if node.op == "call_method" and node.target == "view" and not isinstance(node.args[1], torch.dtype):
            copy.target = "reshape"  # the memory format may be another one
        return copy

    def _as_given(self, averaged: object, node: fx.Node) -> fx.Node:
        # torch adds up pixels in the order of their memory, and so has the program, to agree with the model.
        if node is not averaged:  # a size, or a weight
            return self._float(node)
        given, grid = next(iter(self.graph.nodes)), self._grid(node)
        if grid is None:
            return self._call(AsGiven(), self._float(node), given)
        return self._call(Dequantize(self.grids[grid]), self._call(AsGiven(), self._coded(node), given))

    def _shape(self, node: fx.Node) -> fx.Node:
        return self.floats[node] if node in self.floats else self.codes[node]

    def _product(self, node: fx.Node, clip: tuple[float, float] = NO_CLIP, to: CodeGrid | None = None) -> fx.Node:
        x, layer = node.args[0], submodule_of(self.model, node)
        assert isinstance(x, fx.Node) and isinstance(layer, QuantLayer)
        geometry, grid = geometry_of(layer), self._grid(x)
        assert grid is not None and geometry is not None
        integers = integers_of(node, layer, self.values)
        return self._call(Product(layer, geometry, integers, self.grids[grid], clip, to), self._coded(x))

    # ---- quantizers ----

    def _chain(self, quantizer: fx.Node) -> "Chain":
        source = quantizer.args[0]
        assert isinstance(source, fx.Node)
        before, clip = self._clip(source)
        clips = () if before is source else (source,)
        if len(before.users) == 1:
            if before in self.layers:
                return Chain("layer", before, (*clips, before), clip)
            if operation_of(before, self.model, JOINING) in ("add", "mul") and self._reads_codes(before):
                return Chain("join", before, (*clips, before), clip)
        steps: list[fx.Node] = []
        start = source
        while self._grid(start) is None:
            if self._joins_codes(start):
                return Chain("cat", start, (start, *steps))
            if not self._has_one_value(start):
                return Chain("floats", source)
            steps.insert(0, start)
            start = start.all_input_nodes[0]
        return Chain("table", start, tuple(steps))

    def _clip(self, node: fx.Node) -> tuple[fx.Node, tuple[float, float]]:
        # What a clip is applied to, and its bounds: they are what it makes of -inf and inf.
        if not (is_relu(node, self.model) and self._has_one_value(node)):
            return node, NO_CLIP
        low, high = self._run(node, torch.tensor(NO_CLIP)).tolist()
        return node.all_input_nodes[0], (low, high)

    def _has_one_value(self, node: fx.Node) -> bool:
        # A function of each value of one tensor, for one reader.
        known = is_relu(node, self.model) or operation_of(node, self.model, NONLINEAR) in CURVES
        if not known or len(node.users) != 1 or node.all_input_nodes != [node.args[0]]:
            return False
        return self.memory.can_wait(node.all_input_nodes[0], (node,))

    def _reads_codes(self, node: fx.Node) -> bool:
        if node.kwargs or len(node.args) != 2 or any(self._grid(each) is None for each in node.args):
            return False
        return self.memory.can_wait(node.all_input_nodes[0], (node,))

    def _joins_codes(self, node: fx.Node) -> bool:
        if operation_of(node, self.model, JOINING) != "cat" or len(node.users) != 1:
            return False
        joined = node.all_input_nodes
        return all(self._grid(each) is not None and self.memory.can_wait(each, (node,)) for each in joined)

    def _quantized(self, node: fx.Node) -> fx.Node:
        chain, to = self.chains[node], self.grids[node]
        if chain.kind == "layer":
            return self._product(chain.start, chain.clip, to)
        if chain.kind == "join":
            operands = [self._coded(each) for each in chain.start.args]  # type: ignore[arg-type]
            sources = [self.grids[self._grid(each)] for each in chain.start.args]  # type: ignore[index]
            kind = str(operation_of(chain.start, self.model, JOINING))
            return self._call(Join(kind, (sources[0], sources[1]), to, chain.clip), *operands)
        if chain.kind == "table":
            return self._looked_up(chain.start, chain.steps, to)
        if chain.kind == "cat":
            return self.graph.node_copy(chain.start, lambda x: self._looked_up(x, chain.steps[1:], to))
        return self._call(Quantize(to, self.names[node]), self._float(chain.start))

    def _looked_up(self, node: fx.Node, steps: tuple[fx.Node, ...], to: CodeGrid) -> fx.Node:
        # The codes of a function, from those for each of the 256 codes that it reads.
        grid = self._grid(node)
        assert grid is not None
        values = all_values(self.grids[grid])
        for step in steps:
            values = self._run(step, values.clone())
        return self._call(Table(Quantize(to)(values)), self._coded(node))

    def _run(self, node: fx.Node, value: Tensor) -> Tensor:
        interpreter = fx.Interpreter(self.model)
        interpreter.env = {node.all_input_nodes[0]: value}
        result: Tensor = interpreter.run_node(node)
        return result

    # ---- what moves codes ----

    def _moves_codes(self, node: fx.Node) -> bool:
        if not node.args or self._grid(node) is None or not passes_grid(node, self.model):
            return False
        source, module = node.args[0], submodule_of(self.model, node)
        if source not in self.codes and not isinstance(source, (tuple, list)):
            return False
        if any(self.memory.writers(node)):  # a write would not reach the codes
            return False
        moves = is_call(node, (*DROPOUTS.modules, *MOVES.modules), MOVES.functions, MOVES.methods, self.model)
        return moves or window(node, module) is not None

    def _moved(self, node: fx.Node) -> fx.Node:
        source, pool = node.args[0], window(node, submodule_of(self.model, node))
        assert isinstance(source, fx.Node)
        if pool is not None:
            return self._call(MaxPool(pool.packed()), self.codes[source])
        if node.op == "call_module":
            self.named[str(node.target)] = operator.attrgetter(str(node.target))(self.model)
        copy = self.graph.node_copy(node, lambda x: self.codes.get(x) or self._shape(x))
        if node.target == "view":
            copy.target = "reshape"
        return copy


def merged(program: fx.GraphModule) -> fx.GraphModule:
    """Return a program in fewer passes over memory, with the same results to the bit.

    Products write what their readers want on this processor. x * table(x) of codes x becomes a table, and a table
    behind a product becomes part of that. Where all readers of a product multiply floats, it writes code - zero in
    float32, and code - 128 in int8 where they multiply such bytes. Weights are shared with the given program.
    """
    program = fx.GraphModule(program, copy.deepcopy(program.graph))
    for node in program.graph.nodes:
        found = _gated(program, node)
        if found is not None:
            node.args = found[0]
            program.set_submodule(str(node.target), found[1])
    drop_unread(program.graph, program)  # tables of the products that became tables themselves
    for node in program.graph.nodes:
        step = submodule_of(program, node)
        if not isinstance(step, (Product, Join)) or step.grid is None:
            continue
        step = copy.copy(step)  # the given program keeps its own
        program.set_submodule(str(node.target), step)
        if isinstance(step, Join):
            step.kind = torch.int8 if _wanted(program, node) is torch.int8 else torch.uint8
            continue
        written: Tensor | None = None
        reader = next(iter(node.users))
        table = submodule_of(program, reader)
        if type(table) is Table and len(node.users) == 1:
            written = table.codes.detach()
            reader.replace_all_uses_with(node)
            program.graph.erase_node(reader)
        step.kind = _wanted(program, node)
        if written is not None and step.kind is not torch.uint8:
            source = next(each.source for each in _readers(program, node) if isinstance(each, Product))
            origin = source.zero if step.kind is torch.float32 else SHIFT
            written = (written.float() - origin).to(step.kind)
        step.table = written
    program.delete_all_unused_submodules()
    program.recompile()
    return program


def _readers(program: fx.GraphModule, node: fx.Node) -> list[nn.Module | None]:
    return [submodule_of(program, user) for user in node.users]


def _wanted(program: fx.GraphModule, node: fx.Node) -> torch.dtype:
    readers = _readers(program, node)
    kinds = {each.reads() for each in readers if isinstance(each, Product)}
    others = [each for each in readers if not isinstance(each, Product)]
    if len(kinds) != 1 or any(not isinstance(each, (Join, Dequantize)) for each in others):
        return torch.uint8
    return kinds.pop() if not others or kinds == {torch.int8} else torch.uint8


def _gated(program: fx.GraphModule, node: fx.Node) -> tuple[tuple[fx.Node], Table] | None:
    product: Any = submodule_of(program, node)
    if type(product) is not Join or product.operation != "mul":
        return None
    ends: Any = list(zip(node.args, product.sources, strict=True))
    for (x, plain), (y, tabled) in (ends, ends[::-1]):
        table: Any = submodule_of(program, y)
        if type(table) is Table and y.args == (x,):
            values = all_values(plain) * all_values(tabled)[table.codes.cpu().long()]
            return (x,), Table(Quantize(product.grid)(values.clamp(*product.clip)).to(table.codes.device))
    return None
