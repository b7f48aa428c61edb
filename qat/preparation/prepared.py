"""`prepare`: a quantized copy of a float model."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat.evaluating import evaluating
from qat.layers import QuantLayer
from qat.preparation.fusion import check_patterns
from qat.preparation.graph import bind_inputs, prepare_graph
from qat.preparation.modes import UntraceableError
from qat.preparation.parts import prepare_parts
from qat.preparation.report import LAYERS, noted
from qat.quantizer import Quantizer
from qat.recipe import QuantRecipe


def prepare(
    model: nn.Module,
    recipe: QuantRecipe | None = None,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> nn.Module:
    """A copy of the model with quantized layers and quantizers; the float model is untouched.

    Every tensor that a quantized layer or an integer operation reads gets one quantizer, at its producer. A
    BatchNorm directly behind a convolution is handed to it and folds into its scale. Module names and state-dict
    keys of the float model stay; quantizers add theirs.

    Args:
        model: a float model that torch.fx can trace.
        recipe: the grids; default: 8-bit weights per channel, 8-bit unsigned activations with a zero point.
        example_inputs: a tensor or a tuple of arguments; if given, a probe forward proves that every quantizer runs.

    Returns:
        The prepared model, in the train or eval mode of the float one. Call `calibrate` next.

    Raises:
        ValueError: if the model is prepared already, cannot be traced, has nothing to quantize, if a pattern of the
            recipe names no layer, or if a quantizer does not run in the probe.

    >>> float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    >>> model = prepare(float_model, example_inputs=torch.randn(1, 3, 6, 6))
    >>> [name for name, module in model.named_modules() if isinstance(module, Quantizer)]
    ['0.weight_quantizer', '4.weight_quantizer', 'input_quantizer', '0_quantizer']
    """
    if any(isinstance(module, (Quantizer, QuantLayer)) for module in model.modules()):
        raise ValueError("prepare: the model holds quantizers already; prepare takes the float model")
    recipe = recipe or QuantRecipe()
    root = _copy_of(model)
    examples = None if example_inputs is None else bind_inputs(root, example_inputs)
    prepared: nn.Module
    try:
        prepared = prepare_graph(root, recipe, examples)
    except UntraceableError as error:
        # From a fresh copy, for tracing may leave proxies in what a model remembers.
        prepared = prepare_parts(_copy_of(model), recipe, examples, str(error))
    layers = noted(prepared, LAYERS)
    check_patterns(recipe, layers)
    if not any(isinstance(module, QuantLayer) for module in prepared.modules()):
        raise ValueError(f"prepare: {type(model).__name__} has no layer to quantize")
    prepared.train(model.training)
    if examples is not None:
        probe(prepared, examples)
    return prepared


def _copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        if "graph leaves" not in str(error):
            raise
        raise ValueError(
            f"prepare: {type(model).__name__} cannot be copied, for it keeps a tensor of an earlier forward that has a"
            " gradient history; prepare it before its first forward, or run that under torch.no_grad()"
        ) from error


def probe(model: nn.Module, examples: dict[str, Any]) -> None:
    """Run the model once, in evaluation, and make sure that every quantizer of an activation saw a tensor."""
    silent = {name for name, module in model.named_modules() if isinstance(module, Quantizer)}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: silent.discard(name))
        for name, module in model.named_modules()
        if name in silent
    ]
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    known = [quantizer._is_calibrated for quantizer in quantizers]
    try:
        for quantizer in quantizers:
            quantizer._is_calibrated = True  # the probe is no use of the model: no warning
        with evaluating(model), torch.no_grad():
            model(**examples)
    finally:
        for hook in hooks:
            hook.remove()
        for quantizer, flag in zip(quantizers, known, strict=True):
            quantizer._is_calibrated = flag
    silent = {name for name in silent if not name.endswith("weight_quantizer")}
    if silent:
        raise ValueError(f"prepare: these quantizers never run: {', '.join(sorted(silent))}")
