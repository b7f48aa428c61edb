"""Weights that functions read as plain tensors: `F.linear(x, self.qkv.weight)`, quantized where they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.layers import QuantFunction, QuantLayer, QuantLinear
from qat.layers.function import FLOAT_TYPES
from qat.layers.twins import float_type_of, is_composite
from qat.recipe import AnyRecipe
from qat.tracing.attention import LAYER_NAME
from qat.tracing.constants import constant_nodes, constant_values
from qat.tracing.nodes import free_name, scope_of

CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
READING: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.conv1d: CONVOLUTION_ARGUMENTS,
    F.conv2d: CONVOLUTION_ARGUMENTS,
    F.conv3d: CONVOLUTION_ARGUMENTS,
}
"""Functions that become quantized layers where they read a weight, and the names of their arguments."""


EXPLAINED = "qat_explained"
"""Key of node.meta: the function stays in float, and the reason is noted under the layer's name."""


SPEAKS_AS = "qat_speaks_as"
"""Key of node.meta: the name by which a recipe speaks of a layer that was a function."""


@dataclass(frozen=True)
class Read:
    """A function that reads a parameter as its weight.

    Attributes:
        node: its call.
        given: its arguments by name.
        name: what the layer that it becomes is called.
        layer: the linear layer whose weight it reads whole, and which then is that layer; else None.
        speaks_as: the name by which a recipe speaks of it: the layer's whose weight it reads, else its own.
    """

    node: fx.Node
    given: dict[str, Any]
    name: str
    layer: nn.Linear | None
    speaks_as: str

    @property
    def kind(self) -> type[nn.Module]:
        """The float layer that computes the same."""
        return FLOAT_TYPES[self.node.target]  # type: ignore[index]


def find_reads(graph_module: fx.GraphModule, root: nn.Module) -> list[Read]:
    """All reads of a traced model, in the order in which they run."""
    constant = constant_nodes(graph_module.graph)
    found: list[Read] = []
    taken: set[str] = set()
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node.target not in READING:
            continue
        given = {**dict(zip(READING[node.target], node.args, strict=False)), **node.kwargs}
        if given["weight"] in constant and given["input"] not in constant:
            name, layer = _reader(node, given, root)
            if layer is None:
                name = _unused(name, graph_module, taken)
                taken.add(name)
            owners = [owner for owner in _owners(given["weight"]) if _is_single(root.get_submodule(owner))]
            found.append(Read(node, given, name, layer, owners[0] if len(owners) == 1 and owners[0] else name))
    return found


def quantize_reads(graph_module: fx.GraphModule, reads: list[Read], recipe: AnyRecipe, left: dict[str, str]) -> None:
    """Make every function that reads a parameter as its weight a quantized layer, in place.

    A weight that is read whole, from a linear layer, makes that layer the quantized one; else a `QuantFunction` takes
    the place of the function, and the weight stays where it is.

    Args:
        graph_module: the traced model.
        reads: what `find_reads` found in it.
        recipe: the grids, and which layers to skip.
        left: the layers that stay in float, name to reason; skipped ones are added, quantized ones are taken off.
    """
    values: dict[fx.Node, Any] = {}
    for read in reads:
        layer_recipe = recipe.for_layer(read.speaks_as, read.kind)
        if layer_recipe.skipped_by is not None:
            left[read.speaks_as] = f"skipped by the recipe's pattern {layer_recipe.skipped_by!r}"
            read.node.meta[EXPLAINED] = True
            continue
        left.pop(read.name, None)
        for owner in _owners(read.given["weight"]):  # its own forward may never run, its weight is quantized here
            left.pop(owner, None)
        present = _present(graph_module, read.name)
        if isinstance(present, QuantLayer):  # called or read before: one layer, one weight quantizer
            _replace(read, graph_module)
            continue
        try:
            if read.layer is not None:
                twin: QuantLayer = QuantLinear.from_float(read.layer, layer_recipe.weight)
            else:
                values = values or constant_values(graph_module)
                twin = _function(read, values[read.given["weight"]], layer_recipe.weight)
        except ValueError as error:
            raise ValueError(f"prepare: {recipe.full_name(read.name)} (weight): {error}") from error
        if present is None:
            graph_module.add_submodule(read.name, twin)
        else:
            graph_module.set_submodule(read.name, twin)
        _replace(read, graph_module)


def _function(read: Read, weight: Tensor, spec: Any) -> QuantFunction:
    function: Callable[..., Tensor] = read.node.target  # type: ignore[assignment]
    options = {key: read.given[key] for key in READING[function][3:] if key in read.given}
    twin = QuantFunction(function, tuple(weight.shape), options, spec, device=weight.device)
    if not weight.is_meta:
        twin.fit_weight(weight)
    return twin


def _replace(read: Read, graph_module: fx.GraphModule) -> None:
    # Its arguments may be reads that became layers since.
    given = {**dict(zip(READING[read.node.target], read.node.args, strict=False)), **read.node.kwargs}
    bias = given.get("bias")
    own = isinstance(bias, fx.Node) and bias.op == "get_attr" and bias.target == f"{read.name}.bias"
    with graph_module.graph.inserting_before(read.node):
        if read.layer is None:
            call = graph_module.graph.call_module(read.name, (given["input"], given["weight"], bias))
        else:
            kwargs: dict[str, Any] = {} if bias is None or own else {"bias": bias}
            call = graph_module.graph.call_module(read.name, (given["input"],), kwargs)
    call.meta = {**read.node.meta, SPEAKS_AS: read.speaks_as}
    read.node.replace_all_uses_with(call)
    graph_module.graph.erase_node(read.node)


def _owners(weight: fx.Node) -> set[str]:
    """The modules whose parameters a weight is made of."""
    if weight.op == "get_attr":
        return {str(weight.target).rpartition(".")[0]}
    made = {str(weight.target).rpartition(".parametrizations.")[0]} if weight.op == "call_module" else set()
    return made.union(*(_owners(source) for source in weight.all_input_nodes))


def _reader(node: fx.Node, given: dict[str, Any], root: nn.Module) -> tuple[str, nn.Linear | None]:
    """What the reading layer is called, and the linear layer that it is, if the weight is one's and read whole."""
    weight, bias = given["weight"], given.get("bias")
    if weight.op == "get_attr" and node.target is F.linear:
        owner, _, attribute = str(weight.target).rpartition(".")
        layer = root.get_submodule(owner)
        plain = owner and type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks
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


def _is_single(layer: nn.Module) -> bool:
    """Whether a layer has a twin with one weight, by whose name a recipe speaks."""
    return float_type_of(layer) is not None and not is_composite(layer)


def _present(graph_module: fx.GraphModule, name: str) -> nn.Module | None:
    try:
        return graph_module.get_submodule(name)
    except AttributeError:
        return None
