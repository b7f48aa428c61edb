"""Preparation of a float model: a quantized copy.

Only this file knows both graphs of a prepared model: the plain one, and the one that trains on codes.
"""

import copy
from contextlib import ExitStack
from typing import Literal, overload

import torch
from torch import nn

from qat.analysis.table import summary, warn_of_scales
from qat.contexts import evaluating, in_full_precision
from qat.export.litert.exporter import warn_of_unwritable
from qat.graph.randomness import seeded
from qat.graph.side_effects import CaptureError, restoring_state
from qat.inputs import Examples, Inputs, bind_inputs, call_with, expect_model
from qat.layers import QuantLayer
from qat.layers.twins import QuantTwin, is_composite
from qat.preparation.parts import prepare_graph, prepare_parts
from qat.preparation.prepared_graph import PreparedGraph, keep_all_attributes
from qat.preparation.refusals import check_float_model
from qat.preparation.report import LAYERS, notes_of
from qat.preparation.swapping import check_patterns
from qat.quantizer import Quantizer
from qat.quantizer.base import without_range_warnings
from qat.recipe import QuantRecipe, ScopedRecipe


@overload
def prepare(
    model: nn.Module,
    recipe: QuantRecipe | None = None,
    example_inputs: Inputs | None = None,
    *,
    dry_run: Literal[False] = False,
) -> nn.Module: ...


@overload
def prepare(
    model: nn.Module, recipe: QuantRecipe | None = None, example_inputs: Inputs | None = None, *, dry_run: Literal[True]
) -> str: ...


@in_full_precision
def prepare(
    model: nn.Module, recipe: QuantRecipe | None = None, example_inputs: Inputs | None = None, *, dry_run: bool = False
) -> nn.Module | str:
    """Return a copy of the model with quantized layers and quantizers.

    Every tensor that a quantized layer or a matrix product reads gets one quantizer, at its producer. Sums,
    concatenations and averages compute on grids if their result is read as integers. A BatchNorm directly after a
    layer is passed to it and folds into its scale. Weights that functions read (`F.linear(x, self.qkv.weight)`) are
    quantized where they are read, and attention is split into its products. The float model's module names and
    state-dict keys stay; quantizers add theirs. `qat.summary` says what stays float, and why.

    Quantized layers of your own, and quantizers that forward calls, keep their grids, learned ranges and names. A
    layer's own input quantizer becomes its tensor's, with all that reads it. What is missing for integers (the grid
    of each result behind norm and activation, of sums and pools; layers of torch) is placed by the recipe;
    `calibrate(model, batches, only_missing=True)` then leaves the learned ranges alone.

    If torch.export cannot capture the model, its largest submodules that can be captured are prepared, and other
    layers one by one. The model then keeps its own class, with prepared parts inside.

    Args:
        model: a float model, or one with quantized layers of your own.
        recipe: the grids; default: 8-bit weights per channel, 8-bit unsigned activations with a zero point.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments. With them, the model
            becomes one graph, which is compared with it, one run checks that every quantizer runs, and for the target
            "litert" a warning names what `export_litert` would refuse. Without them, layers are prepared one by one.
        dry_run: return only the table that `qat.summary` would print.

    Returns:
        The prepared model, in the train or eval mode of the float one; call `calibrate` next. With dry_run, the table.

    Raises:
        TypeError: if model is not an nn.Module, or recipe is not a QuantRecipe, for instance example inputs passed
            without their keyword.
        ValueError: if the model is prepared already (by another toolkit too) or has nothing to quantize, if a pattern
            of the recipe matches no layer, if the example inputs do not fit, or if a quantizer does not run with them.

    >>> float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    >>> model = prepare(float_model, example_inputs=torch.randn(1, 3, 6, 6))
    >>> [name for name, module in model.named_modules() if isinstance(module, Quantizer)]
    ['0.weight_quantizer', '4.weight_quantizer', 'input_quantizer', '0_quantizer']
    """
    expect_model(prepare, model)
    check_float_model(model, recipe)
    recipe = recipe or QuantRecipe()
    graph_class: type[PreparedGraph] = PreparedGraph
    from qat.codes.graph import FusedGraph as graph_class  # noqa: N813, F811 - without this line models train plainly

    with seeded(0):  # a model that draws random numbers is captured alike in each run
        root = copy.deepcopy(model)
        examples = None if example_inputs is None else bind_inputs("prepare", root, example_inputs)
        prepared: nn.Module
        try:
            if is_composite(root) or isinstance(root, QuantTwin):
                raise CaptureError(f"{type(root).__name__} is one layer")
            with without_range_warnings(root):
                prepared = prepare_graph(root, ScopedRecipe(recipe), examples, graph_class)
        except CaptureError as error:
            root = copy.deepcopy(model)  # a fresh one, since a capture may leave its marks
            with without_range_warnings(root):
                prepared = prepare_parts(root, recipe, examples, str(error), graph_class)
        layers = notes_of(prepared, LAYERS)
        check_patterns(recipe, layers, model)
        if not any(isinstance(module, QuantLayer) for module in prepared.modules()):
            raise ValueError(f"prepare: {type(model).__name__} has no layer to quantize")
        keep_all_attributes(prepared, root)  # such as `model.classes`, which no graph needs
        _set_modes(prepared, model)
        warn_of_scales(prepared)
        if examples is not None:
            probe(prepared, examples, {name for name, _ in model.named_modules()})
            if recipe.profile.file == "tflite" and example_inputs is not None:
                warn_of_unwritable(prepared, example_inputs)
    return summary(prepared) if dry_run else prepared


def _set_modes(prepared: nn.Module, model: nn.Module) -> None:
    # Module by module: a BatchNorm that is in eval() stays so.
    prepared.train(model.training)
    parts = dict(prepared.named_modules())
    for name, module in model.named_modules():
        twin = parts.get(name)
        if twin is None:
            continue
        if isinstance(twin, QuantTwin):
            twin.train(module.training)
        twin.training = module.training


def probe(model: nn.Module, examples: Examples, own: set[str]) -> None:
    """Run the model; refuse activation quantizers that never run, but the `own` ones."""
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
    silent = {name for name in quantizers if not name.endswith("weight_quantizer")} - own
    with ExitStack() as undo:
        for name, quantizer in quantizers.items():
            undo.enter_context(quantizer.register_forward_hook(lambda *_, name=name: silent.discard(name)))
        with evaluating(model), torch.no_grad(), restoring_state(model), without_range_warnings(model):
            call_with(model, examples)
    if silent:
        raise ValueError(f"prepare: these quantizers never run: {', '.join(sorted(silent))}")
