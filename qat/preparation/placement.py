"""Where quantizers go: one per tensor, at its producer, read by every consumer.

A tensor needs a grid if a quantized layer or a matrix product reads it, directly or through operations that only move
values; sums, products, concatenations and averages ask for one if their own result is read as integers. The
producer's chain ends where the quantizer stands: conv -> BatchNorm -> ReLU is one producer, since nobody reads the
tensors in between, and so is add -> ReLU. So a residual block of convolutions stays in integers from end to end,
while the residual stream of a transformer, which only norms read, stays in float.
"""

from collections.abc import Iterator

from torch import fx, nn

from qat.layers import QuantFunction, QuantLayer
from qat.layers.function import CONVOLUTIONS
from qat.preparation.constants import constant_nodes
from qat.preparation.nodes import free_name, model_device, scope_of, submodule_of, tensor_nodes
from qat.preparation.operations import changes_in_place, is_averaging, is_joining, is_product, is_relu, passes_grid
from qat.quantizer import Quantizer, create_quantizer
from qat.recipe import QuantRecipe
from qat.spec import QuantSpec


class Placement:
    """The quantizers of one graph, as they are decided.

    Args:
        graph_module: a traced model whose layers are already `QuantLayer`s.
        recipe: which grid a tensor gets.
    """

    def __init__(self, graph_module: fx.GraphModule, recipe: QuantRecipe) -> None:
        self.graph_module = graph_module
        self.recipe = recipe
        self.tensors = tensor_nodes(graph_module.graph)
        self.constants = constant_nodes(graph_module.graph)
        self.nodes = list(graph_module.graph.nodes)
        self.wanted: dict[fx.Node, bool] = {}

    def demands(self, node: fx.Node) -> list[QuantSpec]:
        """The grids that the readers of a tensor ask for."""
        found = [pair for pair in readings(node, self.graph_module) if not changes_in_place(pair[0])]
        specs = [spec for reader, operand in found for spec in self._demand(reader, operand)]
        if not specs and self._ends_convolution(node):
            specs = [self.recipe.activation]
        return specs

    def _demand(self, reader: fx.Node, operand: fx.Node) -> list[QuantSpec]:
        """The grid that a reader asks for on one of its operands, as a list of one; empty if it computes in float."""
        module = submodule_of(self.graph_module, reader)
        if isinstance(module, QuantLayer):
            inputs = reader.args[: len(module.grid_arguments)]
            kind = module.float_type if not isinstance(module, QuantFunction) else module.kind
            chosen = self.recipe.for_layer(str(reader.target), kind).activation
            return [chosen] if operand in inputs else []
        if is_product(reader, self.graph_module):
            return [self.recipe.activation]
        if operand in self.constants or not self._takes_grids(reader):
            return []
        return [self.recipe.activation] if self._is_wanted(reader) else []

    def _takes_grids(self, node: fx.Node) -> bool:
        """Whether it runs in integers if its result is read as such: with no parameter or number among its terms."""
        if is_averaging(node, self.graph_module):
            return True
        operands = [operand for operand in node.all_input_nodes if operand in self.tensors]
        joins = is_joining(node, self.graph_module) and len(operands) > 1
        return joins and not self.constants.intersection(operands)

    def _is_wanted(self, node: fx.Node) -> bool:
        """Whether the result is read as integers, at once or behind a ReLU."""
        if node not in self.wanted:
            self.wanted[node] = False  # until known; a graph has no cycles
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


def place_quantizers(graph_module: fx.GraphModule, recipe: QuantRecipe) -> dict[str, str]:
    """Insert activation quantizers and hand every quantized layer the grid of its input.

    Args:
        graph_module: a traced model whose layers are already `QuantLayer`s; changed in place.
        recipe: which grid a tensor gets; where consumers ask for different ones, the one with most bits wins.

    Returns:
        The quantizers whose tensor has a reader that asked for another grid, name to what it asked for.
    """
    placement = Placement(graph_module, recipe)
    compromises: dict[str, str] = {}
    chosen_specs = {
        node: placement.demands(node)
        for node in placement.nodes
        if node in placement.tensors and not passes_grid(node, graph_module)
    }
    for node, wanted in chosen_specs.items():
        if wanted:
            chosen = max(wanted, key=lambda spec: spec.bits)
            name = _insert_quantizer(node, chosen, graph_module)
            others = sorted({str(spec) for spec in wanted if spec != chosen})
            if others:
                compromises[name] = f"shared with a reader that asked for {', '.join(others)}"
    for node in list(graph_module.graph.nodes):
        module = submodule_of(graph_module, node)
        if isinstance(module, QuantLayer):
            _hand_grids(node, module, graph_module)
    return compromises


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


def changes_of(node: fx.Node, graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that write into a tensor after it was made, through views of it too: its grid is found after them."""
    for user in node.users:
        if user.args and user.args[0] is node:
            if changes_in_place(user):
                yield user
            elif passes_grid(user, graph_module):
                yield from changes_of(user, graph_module)


def grid_of(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node | None:
    """The quantizer node on whose grid a tensor lies, else None."""
    while passes_grid(node, graph_module) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if isinstance(submodule_of(graph_module, node), Quantizer) else None


def _insert_quantizer(node: fx.Node, spec: QuantSpec, graph_module: fx.GraphModule) -> str:
    name = free_name(graph_module, f"{_producer_name(node, graph_module)}_quantizer")
    try:
        graph_module.add_submodule(name, create_quantizer(spec, "activation", (), model_device(graph_module)))
    except ValueError as error:
        raise ValueError(f"prepare: {name} (activation): {error}") from error
    changes = [change for change in changes_of(node, graph_module) if change is not node]
    order = {other: position for position, other in enumerate(graph_module.graph.nodes)}
    last = max([node, *changes], key=order.__getitem__)
    with graph_module.graph.inserting_after(last):
        quantized = graph_module.graph.call_module(name, (node,))
    for user in [user for user in node.users if user is not quantized and order[user] > order[last]]:
        user.replace_input_with(node, quantized)
    return name


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
    operation = getattr(anchor.target, "__name__", str(anchor.target))
    return f"{scope}.{operation}" if scope else operation


def _hand_grids(node: fx.Node, layer: QuantLayer, graph_module: fx.GraphModule) -> None:
    for keyword, operand in zip(layer.grid_arguments, node.args, strict=False):
        source = grid_of(operand, graph_module) if isinstance(operand, fx.Node) else None
        if source is None:
            raise ValueError(
                f"prepare: no quantizer reaches the input of {str(node.target)!r};"
                " leave the layer in float with an override {'skip': True}"
            )
        with graph_module.graph.inserting_before(node):
            grid = graph_module.graph.get_attr(str(source.target))
        node.kwargs = {keyword: grid, **node.kwargs}
