"""Models that torch.fx cannot trace as a whole: their largest traceable submodules, and the rest layer by layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from qat.evaluating import evaluating
from qat.layers import QuantLayer
from qat.preparation.attributes import keep_attributes, keep_class, plain_attributes
from qat.preparation.examples import bind_arguments, call_with, copied
from qat.preparation.fusion import is_layer, refusal, swappable_layers
from qat.preparation.graph import prepare_graph
from qat.preparation.kinds import COMPOSITES, float_kind, kind_name, make_twin
from qat.preparation.nodes import model_device
from qat.preparation.prepared_graph import PreparedPart
from qat.preparation.remembering import UntraceableError, remembering
from qat.preparation.report import LAYERS, LEFT_IN_FLOAT
from qat.quantizer import create_quantizer
from qat.recipe import AnyRecipe, QuantRecipe, ScopedRecipe

OWN_QUANTIZERS = ("input_quantizer", "other_quantizer")
"""What a layer calls the quantizers of its own for its first and its second input."""

Calls = Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]]


def prepare_parts(root: nn.Module, recipe: QuantRecipe, examples: dict[str, Any] | None, reason: str) -> nn.Module:
    """Quantize the largest submodules that can be traced, and other layers one by one, in place.

    Args:
        root: a copy of the float model.
        recipe: the grids.
        examples: arguments of forward by name; the submodules' own inputs are recorded from a run with them.
        reason: why the model cannot be traced as a whole.

    Raises:
        ValueError: if a grid of the recipe does not fit.
    """
    calls = None if examples is None else record_calls(root, examples)
    left = {"(the model)": f"prepared in parts, since {reason}"}
    done: dict[int, nn.Module] = {}
    for name in ("first_bits", "last_bits"):
        if getattr(recipe, name) is not None:
            raise ValueError(
                f"prepare: {name}={getattr(recipe, name)} needs a model with one graph, and {reason}; use overrides"
            )
    if float_kind(root) in COMPOSITES:
        return _layer(root, "", recipe, {})
    layers = {name: kind_name(layer) for name, layer in swappable_layers(root)}
    _visit(root, "", ScopedRecipe(recipe, ""), calls, left, done)
    setattr(root, LEFT_IN_FLOAT, left)
    setattr(root, LAYERS, layers)
    return root


def prepared_parts(model: nn.Module) -> dict[str, fx.GraphModule]:
    """The traced parts of a prepared model, name to graph module; a model traced as a whole is its own part, named "".

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
    """Arguments of the first call of every submodule in a run, in evaluation, on the example inputs."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(name: str, args: Any, kwargs: Any) -> None:
        if name not in calls:
            calls[name] = copied((args, kwargs))

    hooks = [
        module.register_forward_pre_hook(lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True)
        for name, module in model.named_modules()
        if name and not isinstance(module, torch.jit.ScriptModule)  # which takes no hooks
    ]
    try:
        with evaluating(model), torch.no_grad(), remembering(model):
            call_with(model, examples)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _visit(
    module: nn.Module,
    path: str,
    scope: ScopedRecipe,
    calls: Calls | None,
    left: dict[str, str],
    done: dict[int, nn.Module],
) -> None:
    # torch's fast path for these computes with the weights as they are, past the layers that hold them.
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder):
        module.enable_nested_tensor = module.use_nested_tensor = False
    for key, child in list(module._modules.items()):
        if child is None:
            continue
        name = f"{path}.{key}" if path else key
        if not any(True for _ in swappable_layers(child)):
            continue
        if id(child) not in done:
            made = _part(child, name, scope, calls, left)
            if made is None:
                _visit(child, name, scope, calls, left, done)
            done[id(child)] = child if made is None else made
        setattr(module, key, done[id(child)])


def _part(
    child: nn.Module, name: str, scope: ScopedRecipe, calls: Calls | None, left: dict[str, str]
) -> nn.Module | None:
    """What takes the submodule's place; None if its own submodules are to be looked at."""
    if calls is not None and name not in calls:
        if is_layer(child):
            left[name] = "forward never calls it for the example inputs"
        return child if is_layer(child) else None
    if is_layer(child):
        return _layer(child, name, scope.recipe, left)
    if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
        return None
    try:
        examples = None if calls is None else bind_arguments(child, *calls[name])
        part = prepare_graph(child, ScopedRecipe(scope.recipe, name), examples, PreparedPart)
        vars(part)["float_class"] = type(child)
    except (UntraceableError, TypeError):
        return None
    # The rest of the model may ask for `backbone.out_channels`, or call `head.compute_loss(...)`.
    kept = dict(part.named_modules())
    for path, inner in child.named_modules():
        if path in kept:
            keep_attributes(plain_attributes(inner), kept[path])
            if not isinstance(inner, nn.MultiheadAttention):  # of which the projections are left
                keep_class(inner, kept[path])
    return part.train(child.training)


def _layer(layer: nn.Module, name: str, recipe: AnyRecipe, left: dict[str, str]) -> nn.Module:
    """The layer's twin with a quantizer of its own for its input, or the layer itself with the reason in `left`."""
    reason = refusal(name, layer, recipe)
    if reason is not None:
        left[name] = reason
        return layer
    chosen = recipe.for_layer(name, float_kind(layer))
    twin = make_twin(name, layer, chosen)
    if isinstance(twin, QuantLayer):
        try:
            for own, _ in zip(OWN_QUANTIZERS, twin.grid_arguments, strict=False):
                setattr(twin, own, create_quantizer(chosen.activation, "activation", (), model_device(twin)))
        except ValueError as error:
            raise ValueError(f"prepare: {name} (activation): {error}") from error
    return twin
