"""`prepare_graph`: one traced graph, quantized. Layers are swapped, functional weights quantized, grids placed."""

from torch import nn

from qat.inputs import Examples
from qat.layers.twins import layers_of, type_name
from qat.preparation.attributes import note_containers
from qat.preparation.functional_weights import FunctionalLayer, find_functional_layers, quantize_functional_layers
from qat.preparation.placement import place_quantizers
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.report import COMPROMISES, LAYERS, LEFT_IN_FLOAT, PROFILE
from qat.preparation.swapping import fuse_batch_norms, name_float_rest, refusal, swap_layers
from qat.recipe import AnyRecipe, ScopedRecipe
from qat.tracing.in_place import copy_before_writes, mark_later_writes
from qat.tracing.train_eval import trace


def prepare_graph(
    root: nn.Module, recipe: AnyRecipe, examples: Examples | None, graph_class: type[PreparedGraph]
) -> PreparedGraph:
    """Trace a float model, or a submodule of one, and quantize the graph, which takes over the model's own layers.

    The recipe's layer names are those in root.

    Raises:
        UntraceableError: if it cannot be traced; the model is then unchanged.
        ValueError: if a grid of the recipe does not fit.
    """
    graph_module, opaque = trace(root, examples, graph_class)
    mark_later_writes(graph_module)
    functional = find_functional_layers(graph_module, root)
    layers = {
        name: type_name(layer)
        for name, layer in layers_of(root)
        if type(layer) is not nn.MultiheadAttention  # the graph calls its projections instead
    }
    layers |= {layer.recipe_name: layer.float_type.__name__ for layer in functional}
    recipe = ScopedRecipe(recipe, "", *_first_and_last(graph_module, root, functional, recipe))
    left = swap_layers(graph_module, root, recipe)
    quantize_functional_layers(graph_module, functional, recipe, left)
    left |= fuse_batch_norms(graph_module)
    compromises = place_quantizers(graph_module, recipe)
    copy_before_writes(graph_module)
    name_float_rest(graph_module, left)
    left |= {name: f"a function that cannot be traced computes in float: {why}" for name, why in opaque.items()}
    note_containers(root, graph_module)
    graph_module.graph.lint()
    graph_module.recompile()
    vars(graph_module).update({LEFT_IN_FLOAT: left, COMPROMISES: compromises, LAYERS: layers, PROFILE: recipe.profile})
    return graph_module


def _first_and_last(
    graph_module: PreparedGraph, root: nn.Module, functional: list[FunctionalLayer], recipe: AnyRecipe
) -> tuple[str, str]:
    """The names of the first and the last layer that will be quantized, in the order of execution."""
    called = dict(layers_of(root))
    of_node = {layer.node: layer for layer in functional}
    order: list[str] = []
    for node in graph_module.graph.nodes:
        if node in of_node and recipe.for_layer(of_node[node].recipe_name, of_node[node].float_type).skipped_by is None:
            order.append(of_node[node].recipe_name)
            continue
        name = str(node.target)
        if node.op == "call_module" and name in called and refusal(name, called[name], recipe) is None:
            order.append(name)
    return (order[0], order[-1]) if order else ("", "")
