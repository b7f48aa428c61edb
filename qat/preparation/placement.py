"""Where quantizers go: one per tensor, at its producer, read by every consumer.

A tensor needs a grid if a quantized layer or an integer operation reads it, directly or through operations that
only move values. The producer's chain ends there: conv -> BatchNorm -> ReLU is one producer, since nobody reads the
tensors in between, and so is add -> ReLU. Residual adds, pooling and concatenation get quantized operands too, so a
residual block stays in integers from end to end.
"""

from collections.abc import Iterator

from torch import fx

from qat.layers import QuantLayer
from qat.preparation.operations import computes_on_grids, is_relu, passes_grid
from qat.preparation.tracing import free_name, model_device, scope_of, submodule_of, tensor_nodes
from qat.quantizer import Quantizer, create_quantizer
from qat.spec import QuantRecipe, QuantSpec


def place_quantizers(graph_module: fx.GraphModule, recipe: QuantRecipe) -> dict[str, str]:
    """Insert activation quantizers and hand every quantized layer the grid of its input.

    Args:
        graph_module: a traced model whose layers are already `QuantLayer`s; changed in place.
        recipe: which grid a tensor gets; where consumers ask for different ones, the one with most bits wins.

    Returns:
        The quantizers whose tensor has a reader that asked for another grid, name to what it asked for.
    """
    tensors = tensor_nodes(graph_module.graph)
    compromises: dict[str, str] = {}
    for node in list(graph_module.graph.nodes):
        if node not in tensors or node.op == "get_attr" or passes_grid(node, graph_module):
            continue
        wanted = [spec for reader in readers(node, graph_module) for spec in _demand(reader, graph_module, recipe)]
        if wanted:
            chosen = max(wanted, key=lambda spec: spec.bits)
            name = _insert_quantizer(node, chosen, graph_module)
            others = sorted({str(spec) for spec in wanted if spec != chosen})
            if others:
                compromises[name] = f"shared with a reader that asked for {', '.join(others)}"
    for node in list(graph_module.graph.nodes):
        if isinstance(submodule_of(graph_module, node), QuantLayer):
            _hand_grid(node, graph_module)
    return compromises


def readers(node: fx.Node, graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes that read a tensor's values, those behind operations that only move them included."""
    for user in node.users:
        if passes_grid(user, graph_module):
            yield from readers(user, graph_module)
        else:
            yield user


def grid_of(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node | None:
    """The quantizer node on whose grid a tensor lies, else None."""
    while passes_grid(node, graph_module) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if isinstance(submodule_of(graph_module, node), Quantizer) else None


def _demand(reader: fx.Node, graph_module: fx.GraphModule, recipe: QuantRecipe) -> list[QuantSpec]:
    """The grid that a reader asks for, as a list of one; empty if it computes in float."""
    if isinstance(submodule_of(graph_module, reader), QuantLayer):
        return [recipe.for_layer(str(reader.target)).activation]
    return [recipe.activation] if computes_on_grids(reader, graph_module) else []


def _insert_quantizer(node: fx.Node, spec: QuantSpec, graph_module: fx.GraphModule) -> str:
    name = free_name(graph_module, f"{_producer_name(node, graph_module)}_quantizer")
    try:
        graph_module.add_submodule(name, create_quantizer(spec, "activation", (), model_device(graph_module)))
    except ValueError as error:
        raise ValueError(f"prepare: {name} (activation): {error}") from error
    with graph_module.graph.inserting_after(node):
        quantized = graph_module.graph.call_module(name, ())
    node.replace_all_uses_with(quantized)
    quantized.args = (node,)
    return name


def _producer_name(node: fx.Node, graph_module: fx.GraphModule) -> str:
    """The layer or operation that made the tensor, looking through ReLUs, which blocks like to share."""
    anchor = node
    while is_relu(anchor, graph_module) and anchor.all_input_nodes[0].op != "placeholder":
        anchor = anchor.all_input_nodes[0]
    if anchor.op == "call_module":
        return str(anchor.target)
    if anchor.op == "placeholder":
        alone = sum(other.op == "placeholder" for other in anchor.graph.nodes) == 1
        return "input" if alone else str(anchor.target)
    scope = scope_of(anchor)
    operation = getattr(anchor.target, "__name__", str(anchor.target))
    return f"{scope}.{operation}" if scope else operation


def _hand_grid(node: fx.Node, graph_module: fx.GraphModule) -> None:
    source = grid_of(node.args[0], graph_module)  # type: ignore[arg-type]
    if source is None:
        raise ValueError(
            f"prepare: no quantizer reaches the input of {str(node.target)!r};"
            " leave the layer in float with an override {'skip': True}"
        )
    with graph_module.graph.inserting_before(node):
        grid = graph_module.graph.get_attr(str(source.target))
    node.kwargs = {"grid": grid, **node.kwargs}
