"""From a float model to quantized graphs: one, or one for each largest submodule.

`prepare_graph` swaps layers, quantizes functional weights and places grids. `prepare_parts` is for models that a graph
cannot hold as a whole: layers outside of the parts are quantized one by one.
"""

from collections.abc import Mapping

import torch
from torch import fx, nn

from qat.contexts import evaluating, first_calls
from qat.graph.in_place import copy_before_writes, mark_later_writes
from qat.graph.modes import trace
from qat.graph.side_effects import CaptureError, restoring_state
from qat.inputs import Arguments, Examples, bind_arguments, call_with, described, does_not_run, model_device
from qat.layers import QuantLayer
from qat.layers.twins import QuantTwin, float_type_of, is_composite, is_layer, layers_of, make_twin, type_name
from qat.preparation.functional_weights import FunctionalLayer, find_functional_layers, quantize_functional_layers
from qat.preparation.placement import place_quantizers
from qat.preparation.prepared_graph import PreparedGraph, keep_attributes, keep_class, plain_attributes
from qat.preparation.report import COMPROMISES, LAYERS, LEFT_IN_FLOAT, PROFILE, WHOLE_MODEL
from qat.preparation.rewriting import rewrite_for_target
from qat.preparation.swapping import fuse_batch_norms, name_float_rest, refusal, swap_layers
from qat.quantizer import Quantizer, create_quantizer
from qat.recipe import QuantRecipe, ScopedRecipe
from qat.torch_internals import children_of


def prepare_graph(
    root: nn.Module, recipe: ScopedRecipe, examples: Examples | None, graph_class: type[PreparedGraph]
) -> PreparedGraph:
    """Trace a float model or submodule, and quantize the graph.

    The graph takes over the model's own layers. A model that cannot be traced is a CaptureError, and unchanged; a grid
    of the recipe that does not fit a ValueError.
    """
    if examples is None:
        raise CaptureError("there are no example_inputs, with which the model would be one graph")
    graph_module = trace(root, examples, graph_class)
    rewrite_for_target(graph_module, recipe)
    mark_later_writes(graph_module)
    functional = find_functional_layers(graph_module, root)
    layers = {
        name: type_name(layer)
        for name, layer in layers_of(root)
        if type(layer) is not nn.MultiheadAttention  # the graph calls its projections instead
    }
    layers |= {layer.recipe_name: layer.float_type.__name__ for layer in functional}
    recipe.first, recipe.last = _first_and_last(graph_module, root, functional, recipe)
    left = swap_layers(graph_module, root, recipe)
    quantize_functional_layers(graph_module, functional, recipe, left)
    left |= fuse_batch_norms(graph_module)
    compromises = place_quantizers(graph_module, recipe)
    copy_before_writes(graph_module)
    name_float_rest(graph_module, left)
    graph_module.graph.lint()
    graph_module.recompile()
    vars(graph_module).update({LEFT_IN_FLOAT: left, COMPROMISES: compromises, LAYERS: layers, PROFILE: recipe.profile})
    return graph_module


def _first_and_last(
    graph_module: PreparedGraph, root: nn.Module, functional: list[FunctionalLayer], recipe: ScopedRecipe
) -> tuple[str, str]:
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


def prepare_parts(
    root: nn.Module, recipe: QuantRecipe, examples: Examples | None, reason: str, graph_class: type[PreparedGraph]
) -> nn.Module:
    """Quantize a copy's largest traceable submodules, and other layers one by one.

    `reason`: why there is no graph of the whole model.
    """
    calls: Mapping[nn.Module, Arguments] | None = None
    if examples is not None:
        try:
            with evaluating(root), torch.no_grad(), restoring_state(root), first_calls(root.modules()) as calls:
                call_with(root, examples)
        except Exception as error:  # of the user's own code
            raise does_not_run("prepare", root, f"the example_inputs {described(examples)}", error) from error
    for name in ("first_bits", "last_bits"):  # only one graph says which layers run first and last
        if getattr(recipe, name) is not None:
            raise ValueError(
                f"prepare: {name}={getattr(recipe, name)} needs a model with one graph, and {reason}; use overrides"
            )
    if is_composite(root) or isinstance(root, QuantTwin):
        return _layer(root, "", ScopedRecipe(recipe), {})
    layers = {name: type_name(layer) for name, layer in layers_of(root)}
    parts = _PartsVisitor(recipe, calls, graph_class, {WHOLE_MODEL: f"prepared in parts, since {reason}"})
    parts.visit(root, "")
    setattr(root, LEFT_IN_FLOAT, parts.left)
    setattr(root, LAYERS, layers)
    return root


def prepared_parts(model: nn.Module) -> dict[str, fx.GraphModule]:
    """Return the traced parts of a prepared model, by name; a whole one is named "".

    >>> import qat
    >>> list(prepared_parts(qat.prepare(nn.Sequential(nn.Linear(4, 2)), example_inputs=torch.randn(8, 4))))
    ['']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, fx.GraphModule) and any(isinstance(part, QuantLayer) for part in module.modules())
    }


class _PartsVisitor:
    # The walk through a model that cannot be traced as a whole. `left`: the layers that stay in float, with reasons;
    # `calls`: what each submodule was given first in a run with the examples; None without examples.

    def __init__(
        self, recipe: QuantRecipe, calls: Mapping[nn.Module, Arguments] | None, graph_class: type[PreparedGraph],
        left: dict[str, str],
    ) -> None:  # fmt: skip
        self.recipe, self.calls, self.graph_class, self.left = recipe, calls, graph_class, left
        self._done: dict[int, nn.Module] = {}  # a shared module is prepared once

    def visit(self, module: nn.Module, path: str) -> None:
        # torch's fast path for these reads the weights directly and does not call the layers that hold them.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        for key, _ in module.named_parameters(recurse=False):
            self.left[f"{path}.{key}".lstrip(".")] = "code that is not traced reads it as a plain tensor"
        for key, child in list(children_of(module).items()):
            name = f"{path}.{key}" if path else key
            if child is None or not any(True for _ in layers_of(child)):
                for own, each in () if child is None else child.named_modules(prefix=name):
                    if any(True for _ in each.parameters(recurse=False)) and not isinstance(each, Quantizer):
                        self.left[own] = f"{type(each).__name__} computes in float"
                continue
            if id(child) not in self._done:
                made = self._part(child, name)
                if made is None:
                    self.visit(child, name)
                self._done[id(child)] = child if made is None else made
            setattr(module, key, self._done[id(child)])

    def _part(self, child: nn.Module, name: str) -> nn.Module | None:
        # None if its own children have to be visited.
        if self.calls is not None and child not in self.calls:
            if is_layer(child):
                self.left[name] = "forward never calls it for the example inputs"
            return child if is_layer(child) else None
        if is_layer(child):
            return _layer(child, name, ScopedRecipe(self.recipe), self.left)
        if self.calls is None or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            return None
        try:
            examples = bind_arguments(child, *self.calls[child])
            part = prepare_graph(child, ScopedRecipe(self.recipe, name), examples, self.graph_class)
        except (CaptureError, TypeError):
            return None
        vars(part)["float_class"] = type(child)
        # The rest of the model may ask for `backbone.out_channels`, or call `head.compute_loss(...)`.
        kept = dict(part.named_modules())
        for path, inner in child.named_modules():
            if path in kept:
                keep_attributes(plain_attributes(inner), kept[path])
                if not isinstance(inner, nn.MultiheadAttention):  # only its projections are left
                    keep_class(inner, kept[path])
        return part.train(child.training)


def _layer(layer: nn.Module, name: str, recipe: ScopedRecipe, left: dict[str, str]) -> nn.Module:
    reason = refusal(name, layer, recipe)
    if reason is not None:
        left[name] = reason
        return layer
    chosen = recipe.for_layer(name, float_type_of(layer))
    twin = make_twin(name, layer, chosen)
    if isinstance(twin, QuantLayer) and twin.has_input_grid and twin.input_quantizer is None:
        try:
            twin.input_quantizer = create_quantizer(chosen.activation, "activation", (), model_device(twin))
            twin.input_quantizer.summed_axis = twin.input_axis
        except ValueError as error:
            raise ValueError(f"prepare: {name} (activation): {error}") from error
    return twin
