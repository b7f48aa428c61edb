"""Placement of quantizers: one per tensor, at its producer, for all consumers.

A tensor needs a grid if a quantized layer or a matrix product reads it, directly or through operations that only move
values. Sums, products, concatenations and averages ask for a grid if their own result is read as integers. The
quantizer stands at the end of the producer's chain: conv -> BatchNorm -> ReLU is one producer, since nothing else reads
the tensors in between, and so is add -> ReLU. A residual block of convolutions thus stays in integers from end to end.
A consumer that asks for fewer bits than others gets a quantizer of its own behind the shared one, and what is computed
in float does not read few bits: it counts as a reader of the residual stream.
The residual stream of a transformer, which only norms read, stays in float.
"""

from collections.abc import Iterator, Mapping

from torch import fx, nn

from qat.graph.guards import EXPECTATIONS
from qat.graph.in_place import Memory, has_own_memory, written_by
from qat.graph.nodes import WRITTEN_LATER, constant_nodes, free_name, join_groups, scope_of, submodule_of, tensor_nodes
from qat.graph.operations import AVERAGING, JOINING, NONLINEAR
from qat.inputs import model_device
from qat.layers import QuantFunction, QuantLayer
from qat.layers.function import CONVOLUTIONS
from qat.preparation.functional_weights import RECIPE_NAME
from qat.preparation.operations import grid_of, is_product, is_relu, operation_of, passes_grid, producer_of
from qat.preparation.rewriting import fix, fixed_grid
from qat.preparation.swapping import call_own_quantizers, drop_repeated
from qat.quantizer import Quantizer, create_quantizer
from qat.quantizer.ties import Ties
from qat.recipe import ScopedRecipe
from qat.spec import QuantSpec
from qat.torch_internals import AnyConvolution


class Placement:
    """Decides which tensors of a traced model, with layers swapped, get a quantizer."""

    def __init__(self, graph_module: fx.GraphModule, recipe: ScopedRecipe) -> None:
        self.graph_module = graph_module
        self.recipe = recipe
        self.profile = recipe.profile
        self.tensors = tensor_nodes(graph_module.graph)
        self.constants = constant_nodes(graph_module.graph)
        self.nodes = list(graph_module.graph.nodes)
        self.memory = Memory(graph_module, graph_module.graph)
        self.order = self.memory.order
        self.wanted: dict[fx.Node, bool] = {}
        for node in reversed(self.nodes):  # consumers first, which keeps the recursion shallow
            self._is_wanted(node)

    def demands(self, node: fx.Node) -> list[QuantSpec]:
        """Return the grids that the consumers of a tensor ask for."""
        found = [pair for pair in readings(node, self.graph_module) if written_by(pair[0], self.graph_module) is None]
        specs = [spec for reader, operand in found for spec in self._demand(reader, operand)]
        if not specs and self._ends_convolution(node):
            return [self.recipe.residual]
        if specs and self.recipe.residual.bits > max(spec.bits for spec in specs):  # float code does not read few bits
            specs += [self.recipe.residual] * any(self._computes_in_float(reader, operand) for reader, operand in found)
        return specs

    def _computes_in_float(self, reader: fx.Node, operand: fx.Node) -> bool:
        # It reads the values, asks for no grid, and so gets the one that stands there.
        layer = isinstance(submodule_of(self.graph_module, reader), QuantLayer)
        reads = reader in self.tensors or reader.op == "output"
        return reads and not layer and not self._demand(reader, operand)

    def own_quantizers(self, node: fx.Node) -> dict[str, Quantizer]:
        """Return the quantizers of one's own that read a tensor, by name."""
        found = [
            (str(reader.target), submodule_of(self.graph_module, reader))
            for reader, _ in readings(node, self.graph_module)
        ]
        return {name: module for name, module in found if isinstance(module, Quantizer)}

    def fewer_bits(self, node: fx.Node, bits: int) -> list[tuple[fx.Node, fx.Node, QuantSpec]]:
        """Return consumers of a tensor that ask for fewer bits, their operands and grids."""
        return [
            (reader, operand, spec)
            for reader, operand in readings(node, self.graph_module)
            for spec in self._demand(reader, operand)
            if spec.bits < bits and not isinstance(submodule_of(self.graph_module, reader), Quantizer)
        ]

    def needs_grid(self, reader: fx.Node, operand: fx.Node) -> bool:
        """Return True if a consumer in the traced graph asks for a grid on this operand."""
        return reader in self.order and bool(self._demand(reader, operand))

    def _demand(self, reader: fx.Node, operand: fx.Node) -> list[QuantSpec]:
        # A list of one grid; empty if the consumer computes in float.
        module = submodule_of(self.graph_module, reader)
        if reader in self.constants:
            return []
        if isinstance(module, Quantizer):
            return [] if operand in self.constants else [module.spec]
        if isinstance(module, QuantLayer):
            chosen = self.recipe.for_layer(
                reader.meta.get(RECIPE_NAME, str(reader.target)), module.float_type
            ).activation
            return [chosen] if module.has_input_grid and operand in reader.args[:1] else []
        if is_product(reader, self.graph_module):
            return [self.recipe.activation]
        if self.profile.quantizes_outputs:  # no float arithmetic: every operation and the model's outputs need a grid
            known = operation_of(reader, self.graph_module, {**JOINING, **AVERAGING, **NONLINEAR})
            return [self.recipe.residual] if reader.op == "output" or known is not None else []
        if operand in self.constants or not self._takes_grids(reader):
            return []
        return [self.recipe.residual] if self._is_wanted(reader) else []

    def _takes_grids(self, node: fx.Node) -> bool:
        # It runs in integers if its result does, and if no parameter or number is among its operands.
        averages = operation_of(node, self.graph_module, AVERAGING)
        joins = operation_of(node, self.graph_module, JOINING)
        if averages:
            return averages not in self.profile.float_operations
        if joins is None or joins in self.profile.float_operations:
            return False
        operands = [operand for operand in node.all_input_nodes if operand in self.tensors]
        return len(operands) > 1 and not self.constants.intersection(operands)

    def _is_wanted(self, node: fx.Node) -> bool:
        # A consumer reads the result as integers, directly or after a ReLU.
        if node not in self.wanted:
            self.wanted[node] = any(
                self._is_wanted(reader) if is_relu(reader, self.graph_module) else bool(self._demand(reader, operand))
                for reader, operand in readings(node, self.graph_module)
            )
        return self.wanted[node]

    def _ends_convolution(self, node: fx.Node) -> bool:
        # A conv -> ReLU that is not an output of the model, since integer kernels have no float result.
        module = submodule_of(self.graph_module, _before_relus(node, self.graph_module))
        ends = [reader for reader, _ in readings(node, self.graph_module)]
        followed = any(is_relu(reader, self.graph_module) or reader.op == "output" for reader in ends)
        return is_convolution(module) and bool(ends) and not followed


def place_quantizers(graph_module: fx.GraphModule, recipe: ScopedRecipe) -> dict[str, str]:
    """Insert activation quantizers, and pass quantized layers those of their inputs.

    If consumers of a tensor ask for different grids, the one with the most bits wins; those that ask for fewer bits
    read a grid of their own behind it. A quantizer of one's own that wins becomes the tensor's, with its range; one
    that does not stays where it is, behind it.

    Returns the grids of as many bits that consumers asked for in vain, by the name of the quantizer that they got.
    """
    call_own_quantizers(graph_module)
    placement = Placement(graph_module, recipe)
    compromises: dict[str, str] = {}
    wanted = {
        node: specs
        for node in placement.nodes
        if node in placement.tensors and not passes_grid(node, graph_module)
        and not isinstance(submodule_of(graph_module, node), Quantizer) and (specs := placement.demands(node))
    }  # fmt: skip
    for group in shared_grids(wanted, placement):
        specs = [spec for node in group for spec in wanted[node]]
        own = {name: each for node in group for name, each in placement.own_quantizers(node).items()}
        fixed = fixed_grid(group[0], placement.graph_module, placement.profile)
        chosen = max(specs, key=lambda spec: spec.bits) if fixed is None else placement.profile.activation
        winners = [name for name, each in own.items() if each.spec.bits == chosen.bits and fixed is None]
        wanted_name = f"{_producer_name(group[0], graph_module)}_quantizer"
        name = winners[0] if winners else _add_quantizer(wanted_name, chosen, placement)
        fix(graph_module, name, fixed)
        fewer = [each for node in group for each in placement.fewer_bits(node, chosen.bits)]
        for node in group:
            _insert_call(node, name, placement)
        _narrow(fewer, name, placement)
        kept = [chosen, *(each.spec for each in own.values())]
        others = sorted({str(spec) for spec in specs if spec not in kept and spec.bits == chosen.bits})
        if others:
            compromises[name] = f"shared with a reader that asked for {', '.join(others)}"
    drop_repeated(graph_module)  # those that placement left behind a quantizer with the same grid
    for node in list(graph_module.graph.nodes):
        module = submodule_of(graph_module, node)
        if isinstance(module, QuantLayer):
            _pass_input_quantizers(node, module, graph_module, recipe)
        elif isinstance(module, Quantizer):
            _move_ties(node, module, placement)
    return compromises


def _move_ties(node: fx.Node, quantizer: Quantizer, placement: Placement) -> None:
    graph_module = placement.graph_module
    source = _before_relus(node.all_input_nodes[0], graph_module)
    kind = operation_of(source, graph_module, {**AVERAGING, **JOINING})
    if kind in JOINING and quantizer.spec.rule != "power_of_two":
        return  # sums on other grids hardly ever are ties
    if kind is not None and (rule := placement.profile.ties.get(kind)) is not None:
        name = free_name(graph_module, f"{source.name}_ties")
        graph_module.add_submodule(name, Ties(quantizer, rule))
        with graph_module.graph.inserting_before(node):
            node.args = (graph_module.graph.call_module(name, node.args),)


def shared_grids(wanted: Mapping[fx.Node, list[QuantSpec]], placement: Placement) -> list[list[fx.Node]]:
    """Return the tensors to quantize, in groups that a target wants on one grid."""
    group_of = {node: [node] for node in wanted}
    table = {**JOINING, **AVERAGING}
    free = {node for node in wanted if fixed_grid(node, placement.graph_module, placement.profile) is None}
    for node in placement.nodes:
        if operation_of(node, placement.graph_module, table) not in placement.profile.shared_grids:
            continue
        around = [producer_of(operand, placement.graph_module) for operand in node.all_input_nodes]
        tied = [end for end in (*around, _end_of_chain(node, placement.graph_module)) if end in free]
        for other in tied[1:]:
            join_groups(group_of, tied[0], other)
    groups = {id(group): sorted(group, key=placement.order.__getitem__) for group in group_of.values()}
    return list(groups.values())


def _end_of_chain(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node:
    while len(node.users) == 1 and is_relu(reader := next(iter(node.users)), graph_module):
        node = reader
    return node


def _before_relus(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node:
    while is_relu(node, graph_module):
        node = node.all_input_nodes[0]
    return node


def is_convolution(module: nn.Module | None) -> bool:
    """Return True if a quantized layer slides a kernel over its input."""
    reads = isinstance(module, QuantFunction) and module.function in CONVOLUTIONS
    return reads or (isinstance(module, QuantLayer) and isinstance(module, AnyConvolution))


def readings(node: fx.Node, graph_module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the consumers of a tensor's values with operands, also of moved values."""
    for user in node.users:
        if passes_grid(user, graph_module) and user.args[0] is node:
            yield from readings(user, graph_module)
        else:
            yield user, node


def _add_quantizer(wanted: str, spec: QuantSpec, placement: Placement) -> str:
    graph_module = placement.graph_module
    name = free_name(graph_module, wanted)
    try:
        quantizer = create_quantizer(spec, "activation", (), model_device(graph_module))
    except ValueError as error:
        raise ValueError(f"prepare: {placement.recipe.full_name(name)} (activation): {error}") from error
    quantizer.label = name
    graph_module.add_submodule(name, quantizer)
    return name


def _insert_call(node: fx.Node, name: str, placement: Placement) -> None:
    # Called after the last in-place write that precedes the first consumer with a grid. All consumers up to the next
    # write read the result; writes still go to the original.
    graph_module, order = placement.graph_module, placement.order
    writers = set(placement.memory.seen_writers(node))
    changes = [order[writer] for writer in writers if order[writer] > order[node]]
    asking = [order[reader] for reader, x in readings(node, graph_module) if placement.needs_grid(reader, x)]
    first = min(asking, default=len(order))
    last = max([order[node], *(change for change in changes if change < first)])
    until = min([change for change in changes if change > last], default=len(order))
    place = placement.nodes[last]
    while node.op == "placeholder" and (place.next.op == "placeholder" or place.next.target in EXPECTATIONS):
        place = place.next  # inputs and their guards come first when a pickled graph is recorded again
    with graph_module.graph.inserting_after(place):
        quantized = graph_module.graph.call_module(name, (node,))
    through = {user for user in node.users if user.meta.get(WRITTEN_LATER) and not has_own_memory(user, graph_module)}
    reading = [user for user in node.users if user not in writers | through and user.target not in EXPECTATIONS]
    for user in [user for user in reading if last < order.get(user, -1) < until]:
        user.replace_input_with(node, quantized)


def _narrow(fewer: list[tuple[fx.Node, fx.Node, QuantSpec]], shared: str, placement: Placement) -> None:
    # a quantizer of fewer bits between the shared one and the consumers that ask for them; one for each grid
    graph_module, calls = placement.graph_module, dict[tuple[fx.Node, QuantSpec], fx.Node]()
    for reader, operand, spec in fewer:
        for given in reader.all_input_nodes:
            source = grid_of(given, graph_module)
            if source is None or source.target != shared or (given is not operand and source.args[0] is not operand):
                continue
            if (given, spec) not in calls:
                name = _add_quantizer(f"{shared}_{spec.bits}_bits", spec, placement)
                with graph_module.graph.inserting_after(given):
                    calls[given, spec] = graph_module.graph.call_module(name, (given,))
            reader.replace_input_with(given, calls[given, spec])


def _producer_name(node: fx.Node, graph_module: fx.GraphModule) -> str:
    # of the layer or operation before any ReLUs: blocks often share one ReLU module
    anchor = node
    while is_relu(anchor, graph_module) and anchor.all_input_nodes[0].op != "placeholder":
        anchor = anchor.all_input_nodes[0]
    if anchor.op in ("call_module", "get_attr"):
        return str(anchor.target)
    if anchor.op == "placeholder":
        alone = sum(other.op == "placeholder" for other in anchor.graph.nodes) == 1
        return "input" if alone else str(anchor.target)
    scope = scope_of(anchor)
    operation = getattr(anchor.target, "__name__", str(anchor.target)).replace(".", "_")
    return f"{scope}.{operation}" if scope else operation


def _pass_input_quantizers(
    node: fx.Node, layer: QuantLayer, graph_module: fx.GraphModule, recipe: ScopedRecipe
) -> None:
    if not (layer.has_input_grid and node.args):
        return
    operand = node.args[0]
    source = grid_of(operand, graph_module) if isinstance(operand, fx.Node) else None
    if source is None:
        raise ValueError(
            f"prepare: no quantizer reaches the input of {recipe.full_name(str(node.target))!r};"
            " leave the layer in float with an override {'skip': True}"
        )
    if operand is source:  # else something moves the axes in between
        setattr(graph_module.get_submodule(str(source.target)), "summed_axis", layer.input_axis)  # noqa: B010
    with graph_module.graph.inserting_before(node):
        grid = graph_module.graph.get_attr(str(source.target))
    node.kwargs = {"input_quantizer": grid, **node.kwargs}
