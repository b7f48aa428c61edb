"""`prepare`: a quantized copy of a float model."""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.evaluating import evaluating
from qat.layers import QuantLayer
from qat.preparation.fusion import fuse_batch_norms, name_float_rest, swap_layers
from qat.preparation.placement import place_quantizers
from qat.preparation.tracing import trace
from qat.quantizer import Quantizer
from qat.spec import QuantRecipe

LEFT_IN_FLOAT = "qat_left_in_float"
"""Key of GraphModule.meta: layer name to the reason why it stays in float."""

COMPROMISES = "qat_compromises"
"""Key of GraphModule.meta: quantizer name to the grid that another reader of its tensor had asked for."""


def prepare(
    model: nn.Module, recipe: QuantRecipe | None = None, example_inputs: Tensor | tuple[Any, ...] | None = None
) -> fx.GraphModule:
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
    root = copy.deepcopy(model)
    graph_module = trace(root)
    left = swap_layers(graph_module, root, recipe)
    left |= fuse_batch_norms(graph_module)
    if not any(isinstance(module, QuantLayer) for module in graph_module.modules()):
        raise ValueError(f"prepare: {type(model).__name__} has no layer to quantize")
    compromises = place_quantizers(graph_module, recipe)
    name_float_rest(graph_module, left)
    graph_module.graph.lint()
    graph_module.recompile()
    graph_module.meta[LEFT_IN_FLOAT] = left
    graph_module.meta[COMPROMISES] = compromises
    graph_module.train(model.training)
    if example_inputs is not None:
        probe(graph_module, example_inputs if isinstance(example_inputs, tuple) else (example_inputs,))
    return graph_module


def probe(model: fx.GraphModule, example_inputs: tuple[Any, ...]) -> None:
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
            model(*example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for quantizer, flag in zip(quantizers, known, strict=True):
            quantizer._is_calibrated = flag
    silent = {name for name in silent if not name.endswith("weight_quantizer")}
    if silent:
        raise ValueError(f"prepare: these quantizers never run: {', '.join(sorted(silent))}")
