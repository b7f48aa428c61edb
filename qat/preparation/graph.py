"""One traced graph from float to quantized: layers swapped, weights quantized where they are read, grids placed."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from qat.preparation.fusion import fuse_batch_norms, name_float_rest, swap_layers, swappable_layers
from qat.preparation.modes import trace
from qat.preparation.nodes import model_device
from qat.preparation.placement import place_quantizers
from qat.preparation.reads import find_reads, quantize_reads
from qat.preparation.report import COMPROMISES, LAYERS, LEFT_IN_FLOAT
from qat.recipe import QuantRecipe

Examples = dict[str, Any]


def prepare_graph(root: nn.Module, recipe: QuantRecipe, examples: Examples | None) -> fx.GraphModule:
    """Trace a float model and quantize the graph; the model's own layers are used up.

    Args:
        root: the float model, or a submodule of one.
        recipe: the grids, by the names of the layers in root.
        examples: arguments of forward by name, or None.

    Raises:
        UntraceableError: if it cannot be traced; it is then as it was.
        ValueError: if a grid of the recipe does not fit.
    """
    graph_module, opaque = trace(root, examples)
    reads = find_reads(graph_module, root)
    layers = {
        name: parametrize.type_before_parametrizations(layer).__name__
        for name, layer in swappable_layers(root)
        if type(layer) is not nn.MultiheadAttention  # of which the graph has the projections
    }
    layers |= {read.name: read.kind.__name__ for read in reads}
    left = swap_layers(graph_module, root, recipe)
    quantize_reads(graph_module, reads, recipe, left)
    left |= fuse_batch_norms(graph_module)
    compromises = place_quantizers(graph_module, recipe)
    name_float_rest(graph_module, left)
    left |= {name: f"a function that cannot be traced computes in float: {why}" for name, why in opaque.items()}
    graph_module.graph.lint()
    graph_module.recompile()
    graph_module.meta |= {LEFT_IN_FLOAT: left, COMPROMISES: compromises, LAYERS: layers}
    return graph_module


def bind_inputs(model: nn.Module, example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> Examples:
    """Example inputs by argument name of forward, on the model's device.

    Raises:
        ValueError: if forward does not take them.
    """
    device = model_device(model)
    moved = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, example_inputs)
    try:
        if isinstance(moved, Mapping):
            return bind_arguments(model, (), dict(moved))
        return bind_arguments(model, moved if isinstance(moved, tuple) else (moved,), {})
    except TypeError as error:
        raise ValueError(f"prepare: example_inputs do not fit {type(model).__name__}.forward: {error}") from error


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Examples:
    """Arguments by the names that forward has for them.

    Raises:
        TypeError: if forward does not take them, or takes any number of them (*args).
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    for parameter in bound.signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name in bound.arguments:
            raise TypeError(f"its arguments have no names, only *{parameter.name}")
    return dict(bound.arguments)
