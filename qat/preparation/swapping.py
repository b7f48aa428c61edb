"""Swaps float layers for quantized twins, and passes each the BatchNorm behind it.

The quantizers of layers that were quantized by hand become calls in the graph in front of these layers. Placement takes
one for what its tensor is to be quantized with, or leaves it behind the tensor's. It keeps its name and its range.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from qat.graph.nodes import FACTS, attribute, constant_nodes, dimensions, submodule_of
from qat.graph.operations import FLOAT_PRODUCTS
from qat.layers import QuantLayer, QuantLinear
from qat.layers.twins import QuantTwin, float_type_of, layers_of, make_twin, type_name
from qat.preparation.functional_weights import REASON_NOTED
from qat.preparation.operations import grid_of
from qat.quantizer import Quantizer
from qat.recipe import TYPE_PREFIX, QuantRecipe, ScopedRecipe, grid_refusal
from qat.text import did_you_mean
from qat.torch_internals import AnyBatchNorm, AnyConvolution, has_backward_hooks, has_forward_hooks


def swap_layers(graph_module: fx.GraphModule, root: nn.Module, recipe: ScopedRecipe) -> dict[str, str]:
    """Replace called layers by twins, in place; return the others, name to reason."""
    called = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"}
    left: dict[str, str] = {}
    composite = ""
    for name, layer in layers_of(root):
        if (composite and name.startswith(composite)) or not name:
            continue  # inside a composite that was replaced; or the model itself
        reason = refusal(name, layer, recipe)
        if reason is None and name not in called:
            reason = "forward never calls it: unused, or its weight is read by a function"
        if reason is None:
            for path, own in layer.named_modules():
                if isinstance(own, Quantizer) and (why := grid_refusal(recipe.profile, own.role, own.spec)):
                    raise ValueError(f"prepare: '{recipe.full_name(name)}.{path}': {why}")
            composite = f"{name}."  # its inner layers went with it
            graph_module.set_submodule(
                name, make_twin(recipe.full_name(name), layer, recipe.for_layer(name, float_type_of(layer)))
            )
        elif type(layer) is not nn.MultiheadAttention:  # the capture takes attention apart
            left[name] = reason
    return left


def refusal(name: str, layer: nn.Module, recipe: ScopedRecipe) -> str | None:
    """Return why a layer stays in float, or None if it has a twin."""
    if isinstance(layer, QuantTwin):
        return None
    float_type = float_type_of(layer)
    skipped_by = recipe.for_layer(name, float_type).skipped_by
    if skipped_by is not None:
        return f"skipped by the recipe's pattern {skipped_by!r}"
    if float_type is None:
        return f"{type_name(layer)} has no quantized twin"
    if has_forward_hooks(layer):
        return "it carries forward hooks, which the twin would lose"
    if has_backward_hooks(layer):
        return "it carries backward hooks, which the twin would lose"
    return None


def name_float_rest(graph_module: fx.GraphModule, left: dict[str, str]) -> None:
    """Add to `left` all else that has parameters and computes in float, such as norms."""
    constant = constant_nodes(graph_module.graph)
    quantized = {str(node.target) for node in graph_module.graph.nodes if node.op == "call_module"}
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target in FLOAT_PRODUCTS.functions and REASON_NOTED not in node.meta:
            left.setdefault(node.name, f"{node.target.__name__} of these operands has no quantized twin")
        if node.op != "get_attr":
            continue
        owner, _, own = str(node.target).rpartition(".")
        held = attribute(graph_module, str(node.target))
        readers = [user for user in _readers(node, constant) if user.op != "call_module" and user.meta.get(FACTS, True)]
        if isinstance(held, nn.Parameter) and readers and owner not in left and owner not in quantized:
            function = getattr(readers[0].target, "__name__", str(readers[0].target))
            if owner and own == "weight" and held.dim() > 1:  # a layer without a twin: DeformConv2d
                left[owner] = f"{function} reads its weight as a plain tensor"
            else:
                left[str(node.target)] = f"{function} reads it as a plain tensor"
    handed = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for name, module in graph_module.named_modules():
        owns = type(module).forward is not nn.Module.forward and any(True for _ in module.parameters(recurse=False))
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in left)
        if owns and name and not inside and name not in handed and not isinstance(module, (QuantTwin, Quantizer)):
            left[name] = f"{type(module).__name__} computes in float"


def _readers(node: fx.Node, constant: set[fx.Node]) -> Iterator[fx.Node]:
    for user in node.users:
        if user in constant:  # computed from parameters alone
            yield from _readers(user, constant)
        else:
            yield user


NORMS: dict[int, tuple[str, ...]] = {
    1: ("BatchNorm1d", "SyncBatchNorm"),
    2: ("BatchNorm2d", "SyncBatchNorm", "FrozenBatchNorm2d"),
    3: ("BatchNorm3d", "SyncBatchNorm"),
}
"""Number of spatial axes of a layer to the norms that fold into it."""


def fuse_batch_norms(graph_module: fx.GraphModule) -> dict[str, str]:
    """Pass layers the BatchNorm that alone reads them; return others, name to reason."""
    left: dict[str, str] = {}
    for node in list(graph_module.graph.nodes):
        norm = submodule_of(graph_module, node)
        frozen = type(norm).__name__ == "FrozenBatchNorm2d"
        if not (isinstance(norm, AnyBatchNorm) or frozen):
            continue
        producer = node.args[0]
        layer = submodule_of(graph_module, producer) if isinstance(producer, fx.Node) else None
        if not isinstance(layer, QuantLayer) or not folds(layer, norm, producer):
            left[str(node.target)] = "no quantized convolution directly before it"
        elif "norm" in producer.kwargs:
            left[str(node.target)] = f"{producer.target} folds another BatchNorm already"
        elif len(producer.users) > 1:
            left[str(node.target)] = f"the output of {producer.target} is read by others too"
        elif getattr(norm, "running_var", None) is None:
            left[str(node.target)] = "it keeps no running statistics to fold"
        else:
            with graph_module.graph.inserting_before(producer):
                handed = graph_module.graph.get_attr(str(node.target))
            producer.kwargs = {**producer.kwargs, "norm": handed}
            node.replace_all_uses_with(producer)
            graph_module.graph.erase_node(node)
    return left


def folds(layer: QuantLayer, norm: nn.Module | None, producer: fx.Node) -> bool:
    """Return True if the norm acts along the layer's output channels."""
    if isinstance(layer, QuantLinear):
        # With more axes BatchNorm1d normalises axis 1, but the channels of a linear layer are on the last axis.
        return type(norm) is nn.BatchNorm1d and dimensions(producer) == 2
    spatial = isinstance(layer, AnyConvolution)
    return spatial and type(norm).__name__ in NORMS[layer.weight.dim() - 2]


def check_patterns(recipe: QuantRecipe, layers: Mapping[str, str], model: nn.Module) -> None:
    """Refuse a recipe with an override that matches none of the layers."""
    twins = {name: layer for name, layer in layers_of(model) if isinstance(layer, QuantTwin)}
    own = {
        name
        for name, twin in twins.items()
        if not (isinstance(twin, QuantLayer) and twin.has_input_grid and twin.input_quantizer is None)
    }  # those that quantize their input themselves
    for pattern in recipe.overrides:
        matched = {name for name, kind in layers.items() if recipe.matches(pattern, name, kind)}
        if matched and matched <= own:
            raise ValueError(
                f"prepare: the recipe's pattern {pattern!r} has no effect: {min(matched)!r} is a quantized layer of"
                " your own, which keeps its grids; set its weight_spec and activation_spec"
            )
        if matched:
            continue
        by_type = pattern.startswith(TYPE_PREFIX)
        names = sorted({TYPE_PREFIX + kind for kind in layers.values()}) if by_type else list(layers)
        hint = did_you_mean(pattern, names, count=3) or f"layers are called {', '.join(names[:3])} ..."
        raise ValueError(f"prepare: the recipe's pattern {pattern!r} names no layer of the model; {hint}")


def call_own_quantizers(graph_module: fx.GraphModule) -> None:
    """Write conv(conv.input_quantizer(x)) for conv(x), with quantizers of one's own."""
    for node in list(graph_module.graph.nodes):
        layer = submodule_of(graph_module, node)
        if not isinstance(layer, QuantLayer) or layer.input_quantizer is None or not node.args:
            continue
        if "input_quantizer" not in node.kwargs:
            operand = node.args[0]
            with graph_module.graph.inserting_before(node):
                call = graph_module.graph.call_module(f"{node.target}.input_quantizer", (operand,))
            call.meta = {key: value for key, value in operand.meta.items() if key == FACTS}
            node.replace_input_with(operand, call)


def drop_repeated(graph_module: fx.GraphModule) -> None:
    """Drop calls of quantizers on their own grid; a layer then shares the first one."""
    nodes = list(graph_module.graph.nodes)
    calls = Counter(str(node.target) for node in nodes if node.op == "call_module")
    for node in nodes:
        mine = submodule_of(graph_module, node)
        before = grid_of(node.args[0], graph_module) if isinstance(mine, Quantizer) else None
        if before is None:
            continue
        first = submodule_of(graph_module, before)
        assert isinstance(first, Quantizer) and isinstance(mine, Quantizer)
        if first is mine or (calls[str(node.target)] == 1 and are_equal(first, mine)):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
            graph_module.set_submodule(str(node.target), first)


def are_equal(a: Quantizer, b: Quantizer) -> bool:
    """Return True if two quantizers have the same spec and the same range."""
    # On device meta there are no ranges yet to differ.
    states = zip(a.state_dict().values(), b.state_dict().values(), strict=False)
    return a is b or (a.spec == b.spec and all(x.is_meta or torch.equal(x, y) for x, y in states))
