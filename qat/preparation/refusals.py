"""Refusals of `prepare`: models that are quantized already, and wrappers."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.report import LEFT_IN_FLOAT
from qat.recipe import QuantRecipe
from qat.torch_internals import pytree

FOREIGN = ("torch.ao.", "torchao.", "brevitas.", "pytorch_quantization.", "modelopt.")
"""Packages whose modules quantize, known by name and never imported."""

IN_FLOAT_MODELS = ("QuantStub", "DeQuantStub", "FloatFunctional", "QuantWrapper")
"""Markers of torch.ao in float models, which compute nothing, or in float."""


def wrapped(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return attribute and model of a wrapper of torch's (DataParallel, ...), or None."""
    if type(model).__module__.startswith("torch.") and type(model).__name__ not in IN_FLOAT_MODELS:
        for attribute in ("_orig_mod", "module"):
            inner = getattr(model, attribute, None)
            if isinstance(inner, nn.Module):
                return attribute, inner
    return None


def check_float_model(model: nn.Module, recipe: object) -> None:
    """Raise the errors of `prepare` for models and recipes that it cannot take."""
    if not (recipe is None or isinstance(recipe, QuantRecipe)):
        raise TypeError(
            f"prepare: recipe must be a QuantRecipe, got {type(recipe).__name__}; inputs are given by name,"
            " prepare(model, example_inputs=...)"
        )
    if any(isinstance(module, PreparedGraph) or LEFT_IN_FLOAT in vars(module) for module in model.modules()):
        raise ValueError(
            "prepare: the model is prepared already; prepare takes the float model, or one with quantized layers of"
            " your own"
        )
    for name, module in model.named_modules():
        kind = next((kind for kind in type(module).__mro__ if f"{kind.__module__}.".startswith(FOREIGN)), None)
        if kind is not None and kind.__name__ not in IN_FLOAT_MODELS:
            raise ValueError(
                f"prepare: {name or 'the model'!r} is a {kind.__module__}.{kind.__name__}, of another toolkit; prepare"
                " takes the float model as it is before fuse_modules or prepare of torch.ao, see docs/coming_over.md"
            )
    inside = wrapped(model)
    if inside is not None:
        raise ValueError(f"prepare: {type(model).__name__} wraps the model; prepare its .{inside[0]} and wrap again")
    compiled = [name.removesuffix("._orig_mod") for name, _ in model.named_modules() if name.endswith("._orig_mod")]
    if compiled:
        raise ValueError(
            f"prepare: {compiled[0]!r} is a torch.compile wrapper; prepare the model before it is compiled"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "prepare: the model is a torch.jit.ScriptModule, which cannot be changed; prepare it unscripted"
        )
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not all(x.is_leaf for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)):
                raise ValueError(
                    f"prepare: {f'{name}.{key}'.lstrip('.')} holds a result with gradients, which cannot be copied:"
                    " detach it, or compute it in forward; norms of weights are in torch.nn.utils.parametrizations,"
                    " and torch.nn.utils.prune.remove makes a pruned weight a parameter again"
                )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"prepare: {lazy[0]!r} has no shape yet; run the model once before it is prepared")
