"""What `export_onnx` refuses, and what it warns of, before it writes anything."""

import os
import warnings
from typing import Any

import torch
from torch import fx, nn

from qat.evaluating import evaluating
from qat.export.integers.consistency import keeps_to_its_grid, rounds_half_to_even, sample_for
from qat.export.integers.frozen import CONTAINER_BITS
from qat.layers import QuantLayer
from qat.preparation.hooks import is_watched
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.report import LEFT_IN_FLOAT
from qat.quantizer import Quantizer
from qat.tracing.inputs import Inputs, call_model

ROUNDS_OTHERWISE = (
    "has other integers than round(x / scale) + zero_point, halves to even, as which runtimes compute those of"
    " activations; use it for weights alone, or set exportable = False"
)
"""The end of the sentence about a rule that no runtime computes on activations."""


def check_exportable(model: nn.Module) -> None:
    """Check that the model is one graph, and that it has integers; see `check_integers`.

    Raises:
        TypeError: if the model holds no quantizer.
        ValueError: if the model was prepared in parts, or for the first quantizer that cannot be written, or that a
            runtime would compute otherwise.
    """
    if LEFT_IN_FLOAT in vars(model) and not isinstance(model, fx.GraphModule):
        raise ValueError(
            f"export_onnx: {type(model).__name__} was prepared in parts, for its forward has no one graph; export each"
            " part, see qat.preparation.parts.prepared_parts(model)"
        )
    check_integers(model, "export_onnx")
    for name, quantizer in model.named_modules():
        if isinstance(quantizer, Quantizer) and not rounds_half_to_even(quantizer):
            raise ValueError(f"export_onnx: {name!r}: the rule {quantizer.spec.rule!r} {ROUNDS_OTHERWISE}")


def check_integers(model: nn.Module, caller: str) -> None:
    """Check that every quantizer of the model is switched on, calibrated, and has integers of at most 8 bits.

    Args:
        model: prepared, or any module that holds quantizers.
        caller: the function that needs the integers, for errors.

    Raises:
        TypeError: if the model holds no quantizer.
        ValueError: for the first quantizer that has no such integers.
    """
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
    if not quantizers:
        raise TypeError(f"{caller}: expected a model from qat.prepare, got {type(model).__name__} without quantizers")
    for name, quantizer in quantizers.items():
        refusal = quantizer.refusal()
        if refusal is not None:
            raise ValueError(f"{caller}: {name!r} {refusal}")
        if quantizer.is_disabled:
            raise ValueError(
                f"{caller}: {name!r} is switched off; call qat.enable_fake_quant(model) first, or prepare the model"
                " with a recipe that skips the layer"
            )
        if not quantizer.is_calibrated:
            raise ValueError(f"{caller}: {name!r} has no range yet; call qat.calibrate(model, batches) first")
        low, high = quantizer.bounds()
        if high - low >= 2**CONTAINER_BITS:
            raise ValueError(
                f"{caller}: {name!r} has the integers {low} to {high}; ONNX Runtime's integer kernels take at most"
                f" {CONTAINER_BITS} bits"
            )
        with evaluating(quantizer):
            agrees = keeps_to_its_grid(quantizer, sample_for(model, name, quantizer))
        if not agrees:
            raise ValueError(
                f"{caller}: {name!r}: the rule {quantizer.spec.rule!r} computes other values in quantize(x) than its"
                " codes(x) and grid() say; make them agree, or set exportable = False"
            )


def check_path(caller: str, path: Any, order: str) -> None:
    """Raise a TypeError if what should be a path is none; `order` is that of the caller's arguments."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{caller}: path must be text or a Path, got {type(path).__name__}; the order is {order}")


def check_inputs(model: nn.Module, example_inputs: Inputs) -> None:
    """Explain an export that failed: the model itself does not run with the inputs.

    Raises:
        ValueError: if that is so.
    """
    try:
        with evaluating(model), torch.no_grad():
            call_model(model, example_inputs)
    except Exception as error:  # of the user's own code
        part = vars(model).get("float_class")
        name = type(model).__name__ if part is None else f"the part {part.__name__}"
        hint = (
            "; its inputs are those that the whole model gives it:"
            " qat.preparation.parts.record_calls(model, {argument: value}) has them by the part's name"
        )
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"export_onnx: {name} does not run with these example_inputs ({lines[0]}){hint if part is not None else ''}"
        ) from error


def warn_of_hooks(model: nn.Module) -> None:
    """Warn of hooks on layers, quantizers and graphs: what is written as integers does not call them."""
    written = (QuantLayer, Quantizer, PreparedGraph)
    watched = [name or type(model).__name__ for name, module in model.named_modules()
               if isinstance(module, written) and is_watched(module)]  # fmt: skip
    if watched:
        warnings.warn(
            f"export_onnx: hooks and patched forwards of {', '.join(watched[:5])} are not in the file; it computes"
            " what the model does without them",
            stacklevel=3,
        )
