"""`export_litert`: a prepared model as a .tflite file of integer operators."""

import copy
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from qat.atomic_write import atomic_write
from qat.contexts import in_full_precision, warnings_ignored
from qat.export.checks import check_exportable, check_new_file, frozen_for, warn_of_hooks, why_not_exported
from qat.export.litert.file import ModelFile, require_litert
from qat.export.litert.translation import LiteRTOperations, Translation
from qat.export.litert.values import Writer
from qat.graph.in_place import copy_written_inputs
from qat.inputs import Inputs, as_arguments, expect_model
from qat.integers.evaluation import evaluation_copy
from qat.preparation.refusals import wrapped
from qat.preparation.report import PROFILE
from qat.quantizer import Quantizer
from qat.text import first_line
from qat.torch_internals import pytree


@in_full_precision
def export_litert(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Inputs,
    *,
    batch: int = 1,
    integer_ends: bool = False,
    four_bits: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write the model for LiteRT (TensorFlow Lite) and TensorFlow Lite Micro.

    The file computes on the integers that were trained: int8 activations and weights, int32 biases. Every image is
    stored as (N, H, W, C), inputs and outputs too. Prepare the model with `QuantRecipe(target="litert")`.

    Args:
        model: a prepared and calibrated model; it is not changed.
        path: the file to write; an existing one is replaced atomically.
        example_inputs: as for `export_onnx`; only the shapes matter, and the first axis is the batch.
        batch: how many samples the file takes at once.
        integer_ends: inputs and outputs are int8, on the grids of their quantizers, and not float32.
        four_bits: store weights of at most 4 bits in 4, and not in 8, in which every engine reads them: LiteRT's sums
            are then rounded in fixed point, and TensorFlow Lite Micro refuses linear layers.
        metadata: notes for the file, such as the names of the classes; each value as JSON, by its name.

    Raises:
        ImportError: without the package ai-edge-litert.
        ValueError: as `export_onnx`, or if LiteRT has no integer operator for an operation, which is named.
    """
    expect_model(export_litert, model)
    check_new_file(Path(path), "export_litert")
    warn_of_hooks(model, "export_litert")
    done = translated(model, example_inputs, batch, integer_ends, four_bits)
    with atomic_write(Path(path)) as temporary:
        temporary.write_bytes(done.file.packed(done.inputs, done.outputs, metadata or {}))


class UnwritableWarning(UserWarning):
    """Warning that `export_litert` will refuse the prepared model."""


def warn_of_unwritable(model: nn.Module, example_inputs: Inputs) -> None:
    """Warn of what `export_litert` will refuse, by writing a file that is thrown away."""
    copied = copy.deepcopy(model)
    for quantizer in copied.modules():
        if isinstance(quantizer, Quantizer):
            quantizer.mark_calibrated()  # any range will do: only the operations matter
    try:
        translated(copied, example_inputs)
    except Exception as error:  # whatever it is, the model is prepared
        kind = UserWarning if isinstance(error, ImportError) else UnwritableWarning
        warnings.warn(f"prepare: {first_line(error)}", kind, stacklevel=3)


def translated(
    model: nn.Module, example_inputs: Inputs, batch: int = 1, integer_ends: bool = False, four_bits: bool = False
) -> Translation:
    """Write a model; a ValueError names all operations that LiteRT cannot take."""
    require_litert("export_litert")
    inside = wrapped(model)
    model = model if inside is None else inside[1]
    check_exportable(model, "export_litert")

    def ready(x: Tensor) -> Tensor:
        return x.detach().cpu().float()[:1].expand(batch, *x.shape[1:]).clone()

    args, options = as_arguments(pytree.tree_map_only(Tensor, ready, example_inputs))
    frozen = frozen_for("export_litert", evaluation_copy(model), LiteRTOperations())
    if isinstance(frozen, fx.GraphModule):
        copy_written_inputs(frozen)
    try:
        with warnings_ignored(), torch.no_grad():
            program = torch.export.export(frozen, args, options).run_decompositions({})
    except Exception as error:  # torch.export has its own types
        raise why_not_exported(model, example_inputs, error, "export_litert", "torch.export") from error
    done = Translation(Writer(ModelFile(), four_bits), program, integer_ends)
    if done.refused:
        advice = "prepare the model with QuantRecipe(target='litert'), which says what a file cannot hold"
        if getattr(vars(model).get(PROFILE), "file", "") == "tflite":
            advice = "take other layers, or a target whose file is ONNX ('integer_only' has the same grids)"
        raise ValueError(f"export_litert: {'; '.join(done.refused.values())}; {advice}")
    return done
