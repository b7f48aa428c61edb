"""Refusals and warnings of exports, before anything is written."""

import re
import warnings
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from qat.analysis.state import not_finite
from qat.collectives import is_sharded
from qat.contexts import evaluating
from qat.inputs import Inputs, call_model, described, does_not_run
from qat.integers.freezing import freeze
from qat.integers.frozen import CONTAINER_BITS, TRAINED_BITS, FreezingError, Operations, rounds_half_to_even
from qat.layers import QuantFunction, QuantLayer
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
"""End of the sentence about a rule that no runtime computes on activations."""

FLOAT32_BYTES = 4


def check_exportable(model: nn.Module, caller: str = "export_onnx", bits: int = CONTAINER_BITS) -> None:
    """Check that the model is one graph and has integers of at most so many bits."""
    if WHOLE_MODEL in vars(model).get(LEFT_IN_FLOAT, {}):
        raise ValueError(
            f"{caller}: {type(model).__name__} was {vars(model)[LEFT_IN_FLOAT][WHOLE_MODEL]}; export each part"
            f" ({', '.join(prepared_parts(model)) or 'there is none'}), see qat.preparation.parts.prepared_parts(model)"
            ", or take the reason away as docs/timm_and_huggingface.md does"
        )
    check_integers(model, caller, bits)
    for name, quantizer in model.named_modules():
        if isinstance(quantizer, Quantizer) and not rounds_half_to_even(quantizer):
            raise ValueError(f"{caller}: {name!r}: the rule {quantizer.spec.rule!r} {ROUNDS_OTHERWISE}")


def check_integers(model: nn.Module, caller: str, bits: int = TRAINED_BITS) -> None:
    """Check that every quantizer is on, calibrated, and has at most so many bits."""
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
    if not quantizers:
        raise TypeError(f"{caller}: expected a model from qat.prepare, got {type(model).__name__} without quantizers")
    check_finite(model, caller)
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"{caller}: {name!r} is sharded over the ranks; load the full state dict into a model of one process,"
                " as docs/many_ranks.md does"
            )
        if parameter.is_floating_point() and parameter.element_size() < FLOAT32_BYTES:
            raise ValueError(
                f"{caller}: {name!r} is {parameter.dtype}, in which scales are too coarse to give the integers; call"
                " model.float() first"
            )
    for name, quantizer in quantizers.items():
        if (refusal := quantizer.refusal()) is not None:
            raise ValueError(f"{caller}: {name!r} {refusal}")
        if quantizer.is_disabled:
            raise ValueError(
                f"{caller}: {name!r} is switched off; call qat.enable_fake_quant(model) first, or prepare the model"
                " with a recipe that skips the layer"
            )
        if not quantizer.is_calibrated:
            raise ValueError(f"{caller}: {name!r} has no range yet; call qat.calibrate(model, batches) first")
        low, high = quantizer.bounds()
        if high - low >= 2**bits:
            takes = "integer kernels take" if bits == CONTAINER_BITS else "it takes"
            raise ValueError(f"{caller}: {name!r} has the integers {low} to {high}; {takes} at most {bits} bits")
        with evaluating(quantizer):
            agrees = keeps_to_its_grid(quantizer, sample_for(model, name, quantizer))
        if not agrees:
            raise ValueError(
                f"{caller}: {name!r}: the rule {quantizer.spec.rule!r} computes other values in quantize(x) than its"
                " codes(x) and grid() say; make them agree, or set exportable = False"
            )


def check_finite(model: nn.Module, caller: str) -> None:
    """Check that no scale, weight or statistic is NaN or infinite."""
    if bad := not_finite(model):  # a quantizer would go on with a scale of its own
        raise ValueError(f"{caller}: {bad}; load the last state that was, and train on from it with a lower lr")


@torch.no_grad()
def keeps_to_its_grid(quantizer: Quantizer, x: Tensor) -> bool:
    """Return True if quantize(x) = (codes(x) - zero_point) * scale."""
    scale, zero_point = quantizer.grid(x)
    expected = (quantizer.codes(x) - zero_point) * scale
    # The difference of NaN weights is NaN and passes; they are refused when their integers are stored.
    off = (quantizer.quantize(x) - expected).abs() > 1e-5 * expected.abs() + 1e-6 * scale
    return not bool(off.any())


def sample_for(model: nn.Module, name: str, quantizer: Quantizer) -> Tensor:
    """Return values to try a quantizer on: its weight, or points around its levels."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, QuantLayer) and owner.weight_quantizer is quantizer and not isinstance(owner, QuantFunction):
        return owner.channels_first(owner.weight.detach())
    scale, zero_point = quantizer.grid()
    low, high = quantizer.bounds()
    points = torch.linspace(low - 1.3, high + 1.7, 61, device=scale.device)
    return (points - zero_point.reshape(*zero_point.shape[:-1], -1)) * scale.reshape(*scale.shape[:-1], -1)


def check_new_file(path: Path, caller: str = "export_onnx") -> None:
    """Check that a file can be written at this path, before the work for it is done."""
    if path.is_dir():
        raise IsADirectoryError(f"{caller}: {str(path)!r} is a folder; give the file in it, such as model.onnx")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{caller}: there is no folder {str(path.parent)!r} to write to; create it first")


def frozen_for(caller: str, evaluated: nn.Module, operations: Operations, weights_alone: bool = False) -> nn.Module:
    """Freeze an `evaluation_copy`; refuse in the caller's name what has no integers."""
    try:
        return freeze(evaluated, operations, weights_alone=weights_alone)
    except FreezingError as error:
        raise ValueError(f"{caller}: {error}") from None


def why_not_exported(
    model: nn.Module, example_inputs: Inputs, error: Exception, caller: str = "export_onnx", by: str = "torch.onnx"
) -> ValueError:
    """Explain a failed export: the model does not run at all, or torch's reason."""
    try:
        with evaluating(model), torch.no_grad():
            result = call_model(model, example_inputs)
    except Exception as failure:  # of the user's own code
        return does_not_run(caller, model, f"the example_inputs {described(example_inputs)}", failure)
    others = [each for each in pytree.tree_leaves(result) if not isinstance(each, Tensor) and each is not None]
    if others:
        return ValueError(f"{caller}: {type(model).__name__} returns {others[0]!r} beside tensors, which no file holds")
    first: BaseException = error  # the last one is torch.onnx's, several lines about how to ask for help
    while first.__cause__ is not None:
        first = first.__cause__
    return ValueError(f"{caller}: {by} cannot export {type(model).__name__}: {first_line(first)}")


def warn_of_hooks(model: nn.Module, caller: str = "export_onnx") -> None:
    """Warn of hooks and patched methods: what is made of integers does not call them."""
    written = (QuantLayer, Quantizer, PreparedGraph)
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, written)]
    watched = [name or type(model).__name__ for name, module in modules if is_watched(module)]
    if watched:
        warnings.warn(
            f"{caller}: hooks and patched methods of {', '.join(watched[:5])} are left out; what is made of integers"
            " computes what the model does without them",
            stacklevel=3,
        )


def result_names(exported: torch.export.ExportedProgram) -> list[str]:
    """Return the path to each tensor of a model's result; "output" without one."""
    results = exported.graph.output_node().args[0][-len(exported.graph_signature.user_outputs) :]
    result = pytree.tree_unflatten(results, exported.call_spec.out_spec)
    # Constants in a result (None, numbers) are no outputs of a file.
    paths = [path for path, leaf in pytree.tree_flatten_with_path(result)[0] if isinstance(leaf, fx.Node)]
    steps = [re.findall(r"[^\[\]'.]+", pytree.keystr(path)) for path in paths]
    return [".".join(["output"] * (not parts or parts[0].isdigit()) + parts) for parts in steps]
