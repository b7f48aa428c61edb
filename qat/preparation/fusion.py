"""Swapping float layers for their quantized twins, and handing each the BatchNorm that follows it."""

import operator
from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.layers import QuantConv2d, QuantLayer, QuantLinear
from qat.preparation.tracing import submodule_of
from qat.quantizer import Quantizer
from qat.spec import QuantRecipe, QuantSpec

TWINS: dict[type[nn.Module], type[QuantLayer]] = {nn.Conv2d: QuantConv2d, nn.Linear: QuantLinear}

WEIGHT_FUNCTIONS = {
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    F.embedding, torch.matmul, torch.bmm, torch.einsum, operator.matmul,
}  # fmt: skip

_LINEAR_FAMILY = (
    nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, nn.RNNBase,
)  # fmt: skip


def swap_layers(graph_module: fx.GraphModule, root: nn.Module, recipe: QuantRecipe) -> dict[str, str]:
    """Replace every layer that has a quantized twin, in place.

    Args:
        graph_module: the traced model; it holds only what its graph calls.
        root: the model that was traced; its layers that the graph does not call are reported too.
        recipe: the grids, and which layers to skip.

    Returns:
        The layers that stay in float, name to reason.

    Raises:
        ValueError: if a pattern of the recipe names no layer.
    """
    called = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"}
    layers = dict(swappable_layers(root))
    _check_patterns(recipe, list(layers))
    left: dict[str, str] = {}
    for name, layer in layers.items():
        layer_recipe = recipe.for_layer(name)
        if layer_recipe.skipped_by is not None:
            left[name] = f"skipped by the recipe's pattern {layer_recipe.skipped_by!r}"
        elif type(layer) not in TWINS:
            left[name] = f"{type(layer).__name__} has no quantized twin"
        elif layer._forward_hooks or layer._forward_pre_hooks or "weight" not in layer._parameters:
            left[name] = "it carries hooks or a reparametrised weight, which the twin would lose"
        elif name not in called:
            left[name] = "forward never calls it: unused in this mode, or its weight is read by a function"
        else:
            graph_module.set_submodule(name, _twin(name, layer, layer_recipe.weight))
    return left


def _twin(name: str, layer: nn.Module, weight_spec: QuantSpec) -> QuantLayer:
    try:
        return TWINS[type(layer)].from_float(layer, weight_spec)
    except ValueError as error:  # a group size that does not divide, NaN in the weight
        raise ValueError(f"prepare: {name} (weight): {error}") from error


def name_float_rest(graph_module: fx.GraphModule, left: dict[str, str]) -> None:
    """Add to `left` whatever else has parameters and computes in float: weights read by functions, norms, slopes."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in WEIGHT_FUNCTIONS:
            for source in node.all_input_nodes:
                owner = str(source.target).rpartition(".")[0]
                if source.op == "get_attr" and owner not in left:
                    function = getattr(node.target, "__name__", str(node.target))
                    left[str(source.target)] = f"{function} reads it as a plain tensor"
    handed = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for name, module in graph_module.named_modules():
        owns = any(True for _ in module.parameters(recurse=False))
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in left)
        if owns and name and not inside and name not in handed and not isinstance(module, (QuantLayer, Quantizer)):
            left[name] = f"{type(module).__name__} computes in float"


def fuse_batch_norms(graph_module: fx.GraphModule) -> dict[str, str]:
    """Hand every quantized convolution the BatchNorm that alone reads its output, in place.

    Returns:
        The BatchNorms that stay in float, name to reason.
    """
    left: dict[str, str] = {}
    for node in list(graph_module.graph.nodes):
        norm = submodule_of(graph_module, node)
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            continue
        producer = node.args[0]
        layer = submodule_of(graph_module, producer) if isinstance(producer, fx.Node) else None
        if not isinstance(layer, QuantConv2d) or type(norm) is not nn.BatchNorm2d:
            left[str(node.target)] = "no quantized convolution directly before it"
        elif len(producer.users) > 1:
            left[str(node.target)] = f"the output of {producer.target} is read by others too"
        elif norm.running_var is None:
            left[str(node.target)] = "it keeps no running statistics to fold"
        else:
            with graph_module.graph.inserting_before(producer):
                handed = graph_module.graph.get_attr(str(node.target))
            producer.kwargs = {**producer.kwargs, "norm": handed}
            node.replace_all_uses_with(producer)
            graph_module.graph.erase_node(node)
    return left


def swappable_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers whose work is a matrix product or a table look-up; the parts of a composite one are not listed."""
    inside_composite: set[str] = set()
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside_composite):
            continue
        if isinstance(module, nn.MultiheadAttention):
            inside_composite.add(name)
        if isinstance(module, _LINEAR_FAMILY):
            yield name, module


def _check_patterns(recipe: QuantRecipe, names: list[str]) -> None:
    for pattern in recipe.overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"layers are called {', '.join(names[:3])} ..."
            raise ValueError(f"prepare: the recipe's pattern {pattern!r} names no layer of the model; {hint}")
