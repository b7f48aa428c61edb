"""What `export_onnx` refuses, and what it warns of, before it writes anything."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat.analysis.table import float_results, said_of
from qat.contexts import evaluating
from qat.export.integers.consistency import keeps_to_its_grid, rounds_half_to_even, sample_for
from qat.export.integers.frozen import CONTAINER_BITS
from qat.inputs import Inputs, call_model, described, does_not_run
from qat.layers import QuantLayer
from qat.preparation.parts import prepared_parts
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.replacements import is_watched
from qat.preparation.report import LEFT_IN_FLOAT, WHOLE_MODEL
from qat.quantizer import Quantizer
from qat.text import first_line
from qat.torch_internals import pytree

ROUNDS_OTHERWISE = (
    "has other integers than round(x / scale) + zero_point, halves to even, as which runtimes compute those of"
    " activations; use it for weights alone, or set exportable = False"
)
"""The end of the sentence about a rule that no runtime computes on activations."""

FLOAT32_BYTES = 4

PLAIN_RESULTS = (torch.Tensor, int, float, complex, bool, str, type(None))
"""What torch.export takes in a model's result, in tuples, lists, dictionaries and whatever else is a pytree."""


def check_exportable(model: nn.Module) -> None:
    """Check that the model is one graph, and that it has integers; see `check_integers`."""
    if WHOLE_MODEL in vars(model).get(LEFT_IN_FLOAT, {}):
        parts = prepared_parts(model)
        way = (
            f"export each part ({', '.join(parts)}), see qat.preparation.parts.prepared_parts(model)"
            ", or take the reason away as docs/timm_and_huggingface.md does"
            if parts
            else "no part of it is one graph; what runs between its decisions becomes a part if it is a submodule"
        )
        raise ValueError(f"export_onnx: {type(model).__name__} was {vars(model)[LEFT_IN_FLOAT][WHOLE_MODEL]}; {way}")
    check_integers(model, "export_onnx")
    for name, quantizer in model.named_modules():
        if isinstance(quantizer, Quantizer) and not rounds_half_to_even(quantizer):
            raise ValueError(f"export_onnx: {name!r}: the rule {quantizer.spec.rule!r} {ROUNDS_OTHERWISE}")


def check_integers(model: nn.Module, caller: str) -> None:
    """Check that every quantizer of the model is switched on, calibrated, and has integers of at most 8 bits."""
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
    if not quantizers:
        raise TypeError(f"{caller}: expected a model from qat.prepare, got {type(model).__name__} without quantizers")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.element_size() < FLOAT32_BYTES:
            raise ValueError(
                f"{caller}: {name!r} is {parameter.dtype}, in which scales are too coarse to give the integers; call"
                " model.float() first"
            )
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
    """Raise a TypeError if path is not a str or PathLike; the message shows the expected order of the arguments."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{caller}: path must be text or a Path, got {type(path).__name__}; the order is {order}")


def check_new_file(path: Path) -> None:
    """Check that a file can be written at this path, before the work for it is done."""
    if path.is_dir():
        raise IsADirectoryError(f"export_onnx: {str(path)!r} is a folder; give the file in it, such as model.onnx")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"export_onnx: there is no folder {str(path.parent)!r} to write to; create it first")


def why_not_exported(model: nn.Module, example_inputs: Inputs, error: Exception) -> ValueError:
    """Explain an export that failed: the model does not run with the inputs, returns no tensors, or torch's reason."""
    name = type(model).__name__
    try:
        with evaluating(model), torch.no_grad():
            answer = call_model(model, example_inputs)
    except Exception as failure:  # of the user's own code
        return does_not_run("export_onnx", model, f"the example_inputs {described(example_inputs)}", failure)
    leaves = [type(leaf).__name__ for leaf in pytree.tree_leaves(answer) if not isinstance(leaf, PLAIN_RESULTS)]
    if leaves:
        return ValueError(
            f"export_onnx: {name} returns {leaves[0]}, into which torch.export does not look; wrap the model in one"
            " that returns its tensors, alone or in a tuple, a list or a dict"
        )
    first: BaseException = error  # the last one is torch.onnx's, several lines about how to ask for help
    while first.__cause__ is not None:
        first = first.__cause__
    return ValueError(f"export_onnx: torch.onnx cannot export {name}: {first_line(first)}")


def warn_of_float_results(model: nn.Module) -> None:
    """Warn of convolutions of one's own that the file computes in float."""
    found = float_results(model)
    if found:
        warnings.warn(f"export_onnx: {said_of(found)}", stacklevel=3)


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
