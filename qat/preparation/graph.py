"""One traced graph from float to quantized: layers swapped, weights quantized where they are read, grids placed."""

from torch import nn

from qat.layers.twins import layers_of, type_name
from qat.preparation.functional_weights import Read, find_reads, quantize_reads
from qat.preparation.placement import place_quantizers
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.report import COMPROMISES, LAYERS, LEFT_IN_FLOAT
from qat.preparation.swapping import fuse_batch_norms, name_float_rest, refusal, swap_layers
from qat.recipe import AnyRecipe, ScopedRecipe
from qat.tracing.in_place import mark_changes
from qat.tracing.inputs import Examples
from qat.tracing.train_eval import trace


def prepare_graph(
    root: nn.Module, recipe: AnyRecipe, examples: Examples | None, graph_class: type[PreparedGraph]
) -> PreparedGraph:
    """Trace a float model and quantize the graph; the model's own layers are used up.

    Args:
        root: the float model, or a submodule of one.
        recipe: the grids, by the names of the layers in root.
        examples: arguments of forward by name, or None.
        graph_class: what the result is.

    Raises:
        UntraceableError: if it cannot be traced; it is then as it was.
        ValueError: if a grid of the recipe does not fit.
    """
    graph_module, opaque = trace(root, examples, graph_class)
    mark_changes(graph_module)
    reads = find_reads(graph_module, root)
    layers = {
        name: type_name(layer)
        for name, layer in layers_of(root)
        if type(layer) is not nn.MultiheadAttention  # of which the graph has the projections
    }
    layers |= {read.speaks_as: read.kind.__name__ for read in reads}
    recipe = ScopedRecipe(recipe, "", *_ends(graph_module, root, reads, recipe))
    left = swap_layers(graph_module, root, recipe)
    quantize_reads(graph_module, reads, recipe, left)
    left |= fuse_batch_norms(graph_module)
    compromises = place_quantizers(graph_module, recipe)
    name_float_rest(graph_module, left)
    left |= {name: f"a function that cannot be traced computes in float: {why}" for name, why in opaque.items()}
    graph_module.graph.lint()
    graph_module.recompile()
    vars(graph_module).update({LEFT_IN_FLOAT: left, COMPROMISES: compromises, LAYERS: layers})
    return graph_module


def _ends(graph_module: PreparedGraph, root: nn.Module, reads: list[Read], recipe: AnyRecipe) -> tuple[str, str]:
    """The first and the last layer that will be quantized, as they run."""
    called = dict(layers_of(root))
    of_node = {read.node: read for read in reads}
    order: list[str] = []
    for node in graph_module.graph.nodes:
        if node in of_node and recipe.for_layer(of_node[node].speaks_as, of_node[node].kind).skipped_by is None:
            order.append(of_node[node].speaks_as)
            continue
        name = str(node.target)
        if node.op == "call_module" and name in called and refusal(name, called[name], recipe) is None:
            order.append(name)
    return (order[0], order[-1]) if order else ("", "")
