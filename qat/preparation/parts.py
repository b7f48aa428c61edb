"""Prepares models that torch.fx cannot trace as a whole: their largest traceable submodules, then single layers."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from qat.contexts import evaluating
from qat.inputs import bind_arguments, call_with, copied, described, does_not_run, model_device
from qat.layers import QuantLayer
from qat.layers.twins import QuantTwin, float_type_of, is_composite, is_layer, layers_of, make_twin, type_name
from qat.preparation.attributes import keep_attributes, keep_class, plain_attributes
from qat.preparation.graph import prepare_graph
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.report import LAYERS, LEFT_IN_FLOAT, WHOLE_MODEL
from qat.preparation.swapping import refusal
from qat.quantizer import create_quantizer
from qat.recipe import AnyRecipe, QuantRecipe, ScopedRecipe
from qat.torch_internals import children_of
from qat.tracing.side_effects import UntraceableError, restoring_state

Calls = Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]]


def prepare_parts(
    root: nn.Module, recipe: QuantRecipe, examples: dict[str, Any] | None, reason: str, graph_class: type[PreparedGraph]
) -> nn.Module:
    """Quantize the largest submodules of a copy of the float model that can be traced, and other layers one by one.

    A run with the examples records the inputs of the submodules. `reason`: why there is no graph of the whole model.
    """
    calls = None
    if examples is not None:
        try:
            calls = record_calls(root, examples)
        except Exception as error:  # of the user's own code
            raise does_not_run("prepare", root, f"the example_inputs {described(examples)}", error) from error
    for name in ("first_bits", "last_bits"):
        if getattr(recipe, name) is not None:
            raise ValueError(
                f"prepare: {name}={getattr(recipe, name)} needs a model with one graph, and {reason}; use overrides"
            )
    if is_composite(root) or isinstance(root, QuantTwin):
        return _layer(root, "", recipe, {})
    layers = {name: type_name(layer) for name, layer in layers_of(root)}
    parts = _PartsVisitor(recipe, calls, graph_class, {WHOLE_MODEL: f"prepared in parts, since {reason}"})
    parts.visit(root, "")
    setattr(root, LEFT_IN_FLOAT, parts.left)
    setattr(root, LAYERS, layers)
    return root


def prepared_parts(model: nn.Module) -> dict[str, fx.GraphModule]:
    """The traced parts of a prepared model, name to graph module; a model traced as a whole is one part, named "".

    >>> import qat
    >>> list(prepared_parts(qat.prepare(nn.Sequential(nn.Linear(4, 2)))))
    ['']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, fx.GraphModule) and any(isinstance(part, QuantLayer) for part in module.modules())
    }


def record_calls(model: nn.Module, examples: dict[str, Any]) -> Calls:
    """The arguments of every submodule's first call, in a run on the example inputs in evaluation."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in calls:
            calls[name] = copied((args, kwargs))

    with ExitStack() as hooks, evaluating(model), torch.no_grad(), restoring_state(model):
        for name, module in model.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):  # these take no hooks
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        call_with(model, examples)
    return calls


class _PartsVisitor:
    """The walk through a model that cannot be traced as a whole.

    `calls` are from `record_calls`, or None without examples; `left` are the layers that stay in float, with reasons.
    """

    def __init__(
        self, recipe: QuantRecipe, calls: Calls | None, graph_class: type[PreparedGraph], left: dict[str, str]
    ) -> None:
        self.recipe, self.calls, self.graph_class, self.left = recipe, calls, graph_class, left
        self._done: dict[int, nn.Module] = {}

    def visit(self, module: nn.Module, path: str) -> None:
        """Quantize the children of a module, in place."""
        # torch's fast path for these reads the weights directly and does not call the layers that hold them.
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        for key, child in list(children_of(module).items()):
            if child is None or not any(True for _ in layers_of(child)):
                continue
            name = f"{path}.{key}" if path else key
            if id(child) not in self._done:
                made = self._part(child, name)
                if made is None:
                    self.visit(child, name)
                self._done[id(child)] = child if made is None else made
            setattr(module, key, self._done[id(child)])

    def _part(self, child: nn.Module, name: str) -> nn.Module | None:
        """The module that replaces a submodule; None if its own children have to be visited."""
        if self.calls is not None and name not in self.calls:
            if is_layer(child):
                self.left[name] = "forward never calls it for the example inputs"
            return child if is_layer(child) else None
        if is_layer(child):
            return _layer(child, name, self.recipe, self.left)
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            return None
        try:
            examples = None if self.calls is None else bind_arguments(child, *self.calls[name])
            part = prepare_graph(child, ScopedRecipe(self.recipe, name), examples, self.graph_class)
        except (UntraceableError, TypeError):
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


def _layer(layer: nn.Module, name: str, recipe: AnyRecipe, left: dict[str, str]) -> nn.Module:
    """The layer's twin with its own input quantizer; or the layer itself, with the reason in `left`."""
    reason = refusal(name, layer, recipe)
    if reason is not None:
        left[name] = reason
        return layer
    chosen = recipe.for_layer(name, float_type_of(layer))
    twin = make_twin(name, layer, chosen)
    if isinstance(twin, QuantLayer):
        try:
            for own in [name for name in twin.quantizer_arguments if getattr(twin, name) is None]:
                setattr(twin, own, create_quantizer(chosen.activation, "activation", (), model_device(twin)))
        except ValueError as error:
            raise ValueError(f"prepare: {name} (activation): {error}") from error
    return twin
