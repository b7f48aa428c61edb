"""Where quantizers go: one per tensor, at its producer, read by every consumer.

A tensor needs a grid if a quantized layer or a matrix product reads it, directly or through operations that only move
values; sums, products, concatenations and averages ask for one if their own result is read as integers. The
producer's chain ends where the quantizer stands: conv -> BatchNorm -> ReLU is one producer, since nobody reads the
tensors in between, and so is add -> ReLU. So a residual block of convolutions stays in integers from end to end,
while the residual stream of a transformer, which only norms read, stays in float.
"""

from collections.abc import Iterator, Mapping

from torch import fx, nn

from qat.layers import QuantFunction, QuantLayer
from qat.layers.function import CONVOLUTIONS
from qat.preparation.functional_weights import SPEAKS_AS
from qat.preparation.operations import (
    AVERAGING,
    CURVES,
    JOINING,
    is_product,
    is_relu,
    operation_of,
    passes_grid,
)
from qat.quantizer import Quantizer, create_quantizer
from qat.recipe import AnyRecipe
from qat.spec import QuantSpec
from qat.tracing.constants import constant_nodes
from qat.tracing.in_place import Memory, written_by
from qat.tracing.inputs import model_device
from qat.tracing.nodes import free_name, scope_of, submodule_of, tensor_nodes


class Placement:
    """The quantizers of one graph, as they are decided.

    Args:
        graph_module: a traced model whose layers are already `QuantLayer`s.
        recipe: which grid a tensor gets.
    """

    def __init__(self, graph_module: fx.GraphModule, recipe: AnyRecipe) -> None:
        self.graph_module = graph_module
        self.recipe = recipe
        self.profile = recipe.profile
        self.tensors = tensor_nodes(graph_module.graph)
        self.constants = constant_nodes(graph_module.graph)
        self.nodes = list(graph_module.graph.nodes)
        self.memory = Memory(graph_module, graph_module.graph)
        self.order = self.memory.order
        self.wanted: dict[fx.Node, bool] = {}
        for node in reversed(self.nodes):  # readers first, so that no question leads through the whole model
            self._is_wanted(node)

    def demands(self, node: fx.Node) -> list[QuantSpec]:
        """The grids that the readers of a tensor ask for."""
        found = [pair for pair in readings(node, self.graph_module) if written_by(pair[0], self.graph_module) is None]
        specs = [spec for reader, operand in found for spec in self._demand(reader, operand)]
        if not specs and self._ends_convolution(node):
            specs = [self.recipe.activation]
        return specs

    def asks(self, reader: fx.Node, operand: fx.Node) -> bool:
        """Whether a reader of the traced graph wants a grid for this operand."""
        return reader in self.order and bool(self._demand(reader, operand))

    def _demand(self, reader: fx.Node, operand: fx.Node) -> list[QuantSpec]:
        """The grid that a reader asks for on one of its operands, as a list of one; empty if it computes in float."""
        module = submodule_of(self.graph_module, reader)
        if reader in self.constants:
            return []
        if isinstance(module, QuantLayer):
            inputs = reader.args[: len(module.quantizer_arguments)]
            chosen = self.recipe.for_layer(reader.meta.get(SPEAKS_AS, str(reader.target)), module.float_type).activation
            return [chosen] if operand in inputs else []
        if is_product(reader, self.graph_module):
            return [self.recipe.activation]
        if self.profile.quantizes_outputs:
            return [self.recipe.activation] if self._has_no_float(reader) else []
        if operand in self.constants or not self._takes_grids(reader):
            return []
        return [self.recipe.activation] if self._is_wanted(reader) else []

    def _has_no_float(self, reader: fx.Node) -> bool:
        """On a target without float arithmetic: every operation, and the model's outputs."""
        known = {**JOINING, **AVERAGING, **CURVES}
        return reader.op == "output" or operation_of(reader, self.graph_module, known) is not None

    def _takes_grids(self, node: fx.Node) -> bool:
        """Whether it runs in integers if its result is read as such: with no parameter or number among its terms."""
        averages = operation_of(node, self.graph_module, AVERAGING)
        joins = operation_of(node, self.graph_module, JOINING)
        if averages or joins in self.profile.float_operations or joins is None:
            return averages is not None and averages not in self.profile.float_operations
        operands = [operand for operand in node.all_input_nodes if operand in self.tensors]
        return len(operands) > 1 and not self.constants.intersection(operands)

    def _is_wanted(self, node: fx.Node) -> bool:
        """Whether the result is read as integers, at once or behind a ReLU."""
        if node not in self.wanted:
            self.wanted[node] = any(
                self._is_wanted(reader) if is_relu(reader, self.graph_module) else bool(self._demand(reader, operand))
                for reader, operand in readings(node, self.graph_module)
            )
        return self.wanted[node]

    def _ends_convolution(self, node: fx.Node) -> bool:
        """Whether this is the end of conv -> ReLU, and no output of the model: integer kernels have no float result."""
        anchor = node
        while is_relu(anchor, self.graph_module):
            anchor = anchor.all_input_nodes[0]
        module = submodule_of(self.graph_module, anchor)
        ends = [reader for reader, _ in readings(node, self.graph_module)]
        followed = any(is_relu(reader, self.graph_module) or reader.op == "output" for reader in ends)
        return is_convolution(module) and bool(ends) and not followed


def place_quantizers(graph_module: fx.GraphModule, recipe: AnyRecipe) -> dict[str, str]:
    """Insert activation quantizers and hand every quantized layer the grid of its input.

    Args:
        graph_module: a traced model whose layers are already `QuantLayer`s; changed in place.
        recipe: which grid a tensor gets; where consumers ask for different ones, the one with most bits wins.

    Returns:
        The quantizers whose tensor has a reader that asked for another grid, name to what it asked for.
    """
    placement = Placement(graph_module, recipe)
    compromises: dict[str, str] = {}
    wanted = {
        node: specs
        for node in placement.nodes
        if node in placement.tensors and not passes_grid(node, graph_module) and (specs := placement.demands(node))
    }
    for group in shared_grids(wanted, placement):
        specs = [spec for node in group for spec in wanted[node]]
        chosen = max(specs, key=lambda spec: spec.bits)
        name = _insert_quantizer(group[0], chosen, placement)
        for node in group[1:]:
            _insert_call(node, name, placement)
        others = sorted({str(spec) for spec in specs if spec != chosen})
        if others:
            compromises[name] = f"shared with a reader that asked for {', '.join(others)}"
    for node in list(graph_module.graph.nodes):
        module = submodule_of(graph_module, node)
        if isinstance(module, QuantLayer):
            _hand_grids(node, module, graph_module, recipe)
    return compromises


def shared_grids(wanted: Mapping[fx.Node, list[QuantSpec]], placement: Placement) -> list[list[fx.Node]]:
    """The tensors to quantize, in groups of one grid: what the target wants inputs and result of an operation on."""
    group_of = {node: [node] for node in wanted}
    table = {**JOINING, **AVERAGING}
    for node in placement.nodes:
        if operation_of(node, placement.graph_module, table) not in placement.profile.shared_grids:
            continue
        around = [_producer(operand, placement.graph_module) for operand in node.all_input_nodes]
        tied = [end for end in (*around, _end_of_chain(node, placement.graph_module)) if end in wanted]
        for other in tied[1:]:
            first, second = group_of[tied[0]], group_of[other]
            if first is not second:
                first.extend(second)
                for member in second:
                    group_of[member] = first
    groups = {id(group): sorted(group, key=placement.order.__getitem__) for group in group_of.values()}
    return list(groups.values())


def _producer(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node:
    """Where the values of a tensor were made, looking through what only moves them."""
    while passes_grid(node, graph_module) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _end_of_chain(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node:
    """The last ReLU behind an operation, or the operation itself: where its quantizer stands."""
    while len(node.users) == 1 and is_relu(reader := next(iter(node.users)), graph_module):
        node = reader
    return node


def is_convolution(module: nn.Module | None) -> bool:
    """Whether a quantized layer slides a kernel over its input."""
    reads = isinstance(module, QuantFunction) and module.function in CONVOLUTIONS
    return reads or (isinstance(module, QuantLayer) and isinstance(module, nn.modules.conv._ConvNd))


def readings(node: fx.Node, graph_module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads a tensor's values, and as which operand; behind operations that only move them too."""
    for user in node.users:
        if passes_grid(user, graph_module) and user.args[0] is node:
            yield from readings(user, graph_module)
        else:
            yield user, node


def grid_of(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node | None:
    """The quantizer node on whose grid a tensor lies, else None."""
    while passes_grid(node, graph_module) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if isinstance(submodule_of(graph_module, node), Quantizer) else None


def _insert_quantizer(node: fx.Node, spec: QuantSpec, placement: Placement) -> str:
    graph_module = placement.graph_module
    name = free_name(graph_module, f"{_producer_name(node, graph_module)}_quantizer")
    try:
        graph_module.add_submodule(name, create_quantizer(spec, "activation", (), model_device(graph_module)))
    except ValueError as error:
        raise ValueError(f"prepare: {placement.recipe.full_name(name)} (activation): {error}") from error
    _insert_call(node, name, placement)
    return name


def _insert_call(node: fx.Node, name: str, placement: Placement) -> None:
    """Call the quantizer behind the last change before somebody asks for the grid, and let all who read the tensor
    then, up to the next change, read the result. Who writes into it for others to see goes on to write there."""
    graph_module, order = placement.graph_module, placement.order
    writers = set(placement.memory.seen_writers(node))
    changes = [order[writer] for writer in writers if order[writer] > order[node]]
    asking = [order[reader] for reader, operand in readings(node, graph_module) if placement.asks(reader, operand)]
    first = min(asking, default=len(order))
    last = max([order[node], *(change for change in changes if change < first)])
    until = min([change for change in changes if change > last], default=len(order))
    with graph_module.graph.inserting_after(placement.nodes[last]):
        quantized = graph_module.graph.call_module(name, (node,))
    for user in [user for user in node.users if last < order.get(user, -1) < until and user not in writers]:
        user.replace_input_with(node, quantized)


def _producer_name(node: fx.Node, graph_module: fx.GraphModule) -> str:
    """The layer or operation that made the tensor, looking through ReLUs, which blocks like to share."""
    anchor = node
    while is_relu(anchor, graph_module) and anchor.all_input_nodes[0].op != "placeholder":
        anchor = anchor.all_input_nodes[0]
    if anchor.op == "call_module":
        return str(anchor.target)
    if anchor.op == "get_attr":
        return str(anchor.target)
    if anchor.op == "placeholder":
        alone = sum(other.op == "placeholder" for other in anchor.graph.nodes) == 1
        return "input" if alone else str(anchor.target)
    scope = scope_of(anchor)
    operation = getattr(anchor.target, "__name__", str(anchor.target)).replace(".", "_")
    return f"{scope}.{operation}" if scope else operation


def _hand_grids(node: fx.Node, layer: QuantLayer, graph_module: fx.GraphModule, recipe: AnyRecipe) -> None:
    for keyword, operand in zip(layer.quantizer_arguments, node.args, strict=False):
        source = grid_of(operand, graph_module) if isinstance(operand, fx.Node) else None
        if source is None:
            raise ValueError(
                f"prepare: no quantizer reaches the input of {recipe.full_name(str(node.target))!r};"
                " leave the layer in float with an override {'skip': True}"
            )
        with graph_module.graph.inserting_before(node):
            grid = graph_module.graph.get_attr(str(source.target))
        node.kwargs = {keyword: grid, **node.kwargs}
