"""Functional layers, `F.linear(x, self.qkv.weight)`, and their quantized weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.graph.leaves import LAYER_NAME
from qat.graph.nodes import constant_nodes, constant_values, free_name, given_by_name, scope_of
from qat.layers import QuantFunction, QuantLayer, QuantLinear
from qat.layers.function import FLOAT_TYPES
from qat.layers.twins import float_type_of, is_composite
from qat.recipe import ScopedRecipe
from qat.spec import QuantSpec
from qat.torch_internals import has_forward_hooks

CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
ARGUMENTS: dict[object, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.conv1d: CONVOLUTION_ARGUMENTS,
    F.conv2d: CONVOLUTION_ARGUMENTS,
    F.conv3d: CONVOLUTION_ARGUMENTS,
}
"""Argument names of functions that become quantized layers on a parameter."""

REASON_NOTED = "qat_explained"
"""Key of node.meta: the reason to stay in float is noted under the layer's name."""

RECIPE_NAME = "qat_recipe_name"
"""Key of node.meta: a recipe's name of a layer that was a function."""


@dataclass(frozen=True)
class FunctionalLayer:
    """A call of a function that reads a parameter as its weight, and its replacement."""

    node: fx.Node
    given: dict[str, Any]  # its arguments by name
    name: str  # of the quantized layer
    module: nn.Linear | None  # the linear layer whose whole weight it reads; it becomes the quantized layer
    recipe_name: str  # that of the layer that owns the weight, or its own

    @property
    def float_type(self) -> type[nn.Module]:
        """The float layer that computes the same."""
        return FLOAT_TYPES[self.node.target]  # type: ignore[index]


def find_functional_layers(graph_module: fx.GraphModule, root: nn.Module) -> list[FunctionalLayer]:
    """Return the functional layers of a traced model, in the order in which they run."""
    constant = constant_nodes(graph_module.graph)
    found: list[FunctionalLayer] = []
    taken: set[str] = set()
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node.target not in ARGUMENTS:
            continue
        given = given_by_name(node, ARGUMENTS[node.target])
        if given["weight"] in constant and given["input"] not in constant:
            name, layer = _reader(node, given, root)
            if layer is None:
                name = _unused(name, graph_module, taken)
                taken.add(name)
            owned = {owner: root.get_submodule(owner) for owner in _owners(given["weight"])}
            # A layer whose twin has this weight alone: the recipe speaks of it by the layer's name.
            owners = [
                owner for owner, each in owned.items() if float_type_of(each) is not None and not is_composite(each)
            ]
            found.append(
                FunctionalLayer(node, given, name, layer, owners[0] if len(owners) == 1 and owners[0] else name)
            )
    return found


def quantize_functional_layers(
    graph_module: fx.GraphModule, layers: list[FunctionalLayer], recipe: ScopedRecipe, left: dict[str, str]
) -> None:
    """Replace every functional layer by a quantized one, in place.

    If the function reads the whole weight of a linear layer, that layer is quantized. Otherwise a `QuantFunction`
    replaces the function, and the weight stays where it is. Skipped layers are added to `left`, the layers that stay
    in float (name to reason), and quantized ones are removed.
    """
    values: dict[fx.Node, Any] = {}
    for layer in layers:
        layer_recipe = recipe.for_layer(layer.recipe_name, layer.float_type)
        if layer_recipe.skipped_by is not None:
            left[layer.recipe_name] = f"skipped by the recipe's pattern {layer_recipe.skipped_by!r}"
            layer.node.meta[REASON_NOTED] = True
            continue
        left.pop(layer.name, None)
        for owner in _owners(layer.given["weight"]):  # its own forward may never run, but its weight is quantized here
            left.pop(owner, None)
        present = dict(graph_module.named_modules(remove_duplicate=False)).get(layer.name)
        if isinstance(present, QuantLayer):  # called before: one layer, one weight quantizer
            _replace(layer, graph_module)
            continue
        try:
            if layer.module is not None:
                twin: QuantLayer = QuantLinear.from_float(layer.module, layer_recipe.weight, None)
            else:
                values = values or constant_values(graph_module)
                twin = _function(layer, values[layer.given["weight"]], layer_recipe.weight)
        except ValueError as error:
            raise ValueError(f"prepare: {recipe.full_name(layer.name)} (weight): {error}") from error
        graph_module.add_submodule(layer.name, twin)
        _replace(layer, graph_module)


def _function(layer: FunctionalLayer, weight: Tensor, spec: QuantSpec) -> QuantFunction:
    function: Callable[..., Tensor] = layer.node.target  # type: ignore[assignment]
    options = {key: layer.given[key] for key in ARGUMENTS[function][3:] if key in layer.given}
    twin = QuantFunction(function, tuple(weight.shape), options, spec, device=weight.device)
    if not weight.is_meta:
        twin.fit_weight(weight)
    return twin


def _replace(layer: FunctionalLayer, graph_module: fx.GraphModule) -> None:
    # Its arguments may be functional layers that were replaced since.
    given = given_by_name(layer.node, ARGUMENTS[layer.node.target])
    bias = given.get("bias")
    own = isinstance(bias, fx.Node) and bias.op == "get_attr" and bias.target == f"{layer.name}.bias"
    with graph_module.graph.inserting_before(layer.node):
        if layer.module is None:
            call = graph_module.graph.call_module(layer.name, (given["input"], given["weight"], bias))
        else:
            kwargs = {} if bias is None or own else {"bias": bias}
            call = graph_module.graph.call_module(layer.name, (given["input"],), kwargs)
    call.meta = {**layer.node.meta, RECIPE_NAME: layer.recipe_name}
    layer.node.replace_all_uses_with(call)
    graph_module.graph.erase_node(layer.node)


def _owners(weight: fx.Node) -> set[str]:
    if weight.op == "get_attr":
        return {str(weight.target).rpartition(".")[0]}
    made = {str(weight.target).rpartition(".parametrizations.")[0]} if weight.op == "call_module" else set()
    return made.union(*(_owners(source) for source in weight.all_input_nodes))


def _reader(node: fx.Node, given: dict[str, Any], root: nn.Module) -> tuple[str, nn.Linear | None]:
    # The name of the quantized layer, and the linear layer whose whole weight the call reads, if there is one.
    weight, bias = given["weight"], given.get("bias")
    if weight.op == "get_attr" and node.target is F.linear:
        owner, _, attribute = str(weight.target).rpartition(".")
        layer = root.get_submodule(owner)
        plain = owner and type(layer) is nn.Linear and not has_forward_hooks(layer)
        if plain and attribute == "weight" and (bias is not None or layer.bias is None):
            assert isinstance(layer, nn.Linear)
            return owner, layer
    wanted = str(node.meta.get(LAYER_NAME) or getattr(node.target, "__name__", "function"))
    scope = scope_of(node)
    return (f"{scope}.{wanted}" if scope else wanted), None


def _unused(name: str, graph_module: fx.GraphModule, taken: set[str]) -> str:
    candidate, number = free_name(graph_module, name), 0
    while candidate in taken:
        number += 1
        candidate = free_name(graph_module, f"{name}_{number}")
    return candidate
