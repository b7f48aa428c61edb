"""`export_onnx`: a prepared model as an ONNX file with integer initializers."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from torch import fx, nn

from qat.analysis.table import float_results, sentence_about
from qat.contexts import in_full_precision
from qat.export.checks import check_exportable, check_new_file, frozen_for, warn_of_hooks, why_not_exported
from qat.export.onnx.formats import as_json, pack_weights, save, store_once, take_pixels, to_qonnx
from qat.export.onnx.names import name_quantizers, name_weights, own_initializers, rename_inputs_outputs, strip_traces
from qat.export.onnx.operators import OPSET, OPSETS, OnnxOperations
from qat.export.onnx.program import PLACES, Axes, export_program, fix_sizes, larger, name_outputs, refuse_lost_options
from qat.export.onnxruntime.passes import add_barriers, add_exactly, fold_clips, rewrite_for_runtime
from qat.export.onnxruntime.verification import check_other_sizes
from qat.graph.guards import condition_on_batch
from qat.inputs import Inputs, expect_model
from qat.integers.evaluation import drop_defaults, evaluation_copy
from qat.integers.freezing import frozen_grids
from qat.integers.frozen import CONTAINER_BITS, TRAINED_BITS
from qat.preparation.refusals import wrapped
from qat.preparation.report import PROFILE

if TYPE_CHECKING:
    from onnx import ModelProto

Format = Literal["qdq", "qonnx"]


@in_full_precision
def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Inputs,
    *,
    metadata: Mapping[str, object] | None = None,
    exact_sums: bool = False,
    format: Format = "qdq",
    packed: bool = True,
    opset: int = OPSET,
    dynamic: Axes = ("batch",),
    normalization: tuple[Sequence[float], Sequence[float]] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write the model as an ONNX file: int8 weights, int32 biases, trained grids.

    The form is QuantizeLinear and DequantizeLinear. For TensorRT (`TargetProfile.float_biases`) biases are floats, and
    few bits are not packed, and clipped as floats. Ranges are not estimated again. BatchNorm is folded into the
    weight's scale. Weights of 5 to 8 bits are stored in int8, those of 1 to 4 bits in 4-bit containers, at opset 25
    those of 2 bits in 2. The batch axis is free where the model allows it. The output of quantizer
    `layer1.0.add_quantizer` has this name in the file: so `compare_layers` finds it.

    Args:
        model: a prepared and calibrated model, or a module of quantized layers of your own; it is not changed. What
            torch wraps around it (DataParallel, AveragedModel, torch.compile) is left out of the file. Of a model that
            was prepared in parts, export the parts: `qat.preparation.parts.prepared_parts(model)`.
        path: the file to write; an existing one is replaced atomically. Above 2 GB, which is all that one file may
            have, the integers go to a second one beside it, `model.onnx.data` for `model.onnx`; keep them together.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments; of floating-point tensors
            only the shapes matter. The first axis is the batch.
        metadata: what else a program has to know, such as the names of the classes: it goes into the file's
            `metadata_props`, each value as JSON. Read it with `json.loads` from ONNX Runtime's
            `session.get_modelmeta().custom_metadata_map`. docs/run_folder.md lists what `train.py` writes.
        exact_sums: add in float32, as torch does, wherever a quantizer reads a sum. ONNX Runtime's integer sum gives
            about one integer of 100,000 the neighbour, near a tie, which can turn a prediction that is nearly a tie
            itself. Sums that end on fewer than 8 bits are always exact.
        format: "qdq" is that form. "qonnx" is for FPGAs (FINN, hls4ml): floats, and a `Quant` of the domain
            qonnx.custom_op.general on every grid; the package qonnx runs it, ONNX Runtime does not.
        packed: store integers of at most 4 bits in 4-bit containers (opset 21), from which a Cast makes the 8 bits of
            the kernels when a runtime loads the file: ONNX Runtime is as fast with them. False for a runtime that does
            not read INT4; an opset below 21 has none. Opset 25 has containers of 2 bits too.
        opset: the version of ONNX's operators, 13 to 25; a runtime older than the opset does not read the file.
        dynamic: axes of free sizes: "batch", and of images (N, C, H, W) "height" and "width". With these the file is
            compared with the model at larger sizes. Of sizes that the model itself refuses, it may make anything.
        normalization: (mean, std) of red, green and blue, of pixels in [0, 1]: the file then takes `pixels`, uint8
            images (N, H, W, 3), and computes (pixel/255 - mean) / std itself, to the bit as `train.py` does.
            `example_inputs` stay what the model takes.
        input_names, output_names: of the file, in their order; None: those of forward's arguments, and the keys,
            fields and indices of its result ("logits", "out.0"), "output" for a single tensor.

    Raises:
        TypeError: if the model holds no quantizer, the path is not a path, or the metadata cannot be written as JSON.
        FileNotFoundError: if the folder of the path is missing.
        ValueError: if the model was prepared in parts, if a quantizer is not calibrated, not exportable or wider than 8
            bits (QONNX takes 16), if a parameter has fewer bits than float32, if the model does not run with the inputs
            or returns something else than tensors, if torch.onnx cannot export it, if the ONNX graph lacks a quantizer,
            or for an opset, a format, axes or names that do not fit.
    """
    expect_model(export_onnx, model)
    check_new_file(Path(path))
    if type(opset) is not int or opset not in OPSETS:
        raise ValueError(f"export_onnx: opset must be {OPSETS[0]} to {OPSETS[-1]}, got {opset!r}")
    if format not in get_args(Format):
        raise ValueError(f"export_onnx: format must be {', '.join(get_args(Format))}, got {format!r}")
    if isinstance(dynamic, str) or not {*dynamic} <= {*PLACES}:
        raise ValueError(f"export_onnx: dynamic must be a list of {', '.join(PLACES)}, got {dynamic!r}")
    notes = as_json(metadata or {})
    inside = wrapped(model)  # its batch axis would be fixed: the exporter gives free axes to arguments with names
    model = model if inside is None else inside[1]
    check_exportable(model, bits=TRAINED_BITS if format == "qonnx" else CONTAINER_BITS)
    warn_of_hooks(model)
    if found := float_results(model):
        warnings.warn(f"export_onnx: {sentence_about(found)}", stacklevel=2)
    float_biases = any(vars(part)[PROFILE].float_biases for part in model.modules() if PROFILE in vars(part))
    proto = _traced(model, example_inputs, OnnxOperations(opset, float_biases, format == "qonnx"), dynamic)
    if format == "qonnx":  # its runtimes compute in float: the changes for ONNX Runtime's kernels are not needed
        to_qonnx(proto)
    else:
        add_exactly(proto, everywhere=exact_sums)
        fold_clips(proto, of_floats=float_biases)
        add_barriers(proto)
        if not float_biases:  # TensorRT looks for weights among the initializers
            store_once(proto)
    if packed and not float_biases:
        pack_weights(proto, opset)
    strip_traces(proto.graph)
    if normalization is not None:
        take_pixels(proto, normalization)
    rename_inputs_outputs(proto, input_names, output_names)
    save(proto, Path(path), notes)


def _traced(model: nn.Module, example_inputs: Inputs, operations: OnnxOperations, dynamic: Axes) -> "ModelProto":
    if "batch" in dynamic and isinstance(model, fx.GraphModule) and (broken := condition_on_batch(model.graph)):
        said = f"is fixed at that of example_inputs, for the model was prepared with {broken}"
        warnings.warn(f"export_onnx: the batch {said}", stacklevel=3)
        dynamic = [each for each in dynamic if each != "batch"]
    evaluated = evaluation_copy(model)
    inputs = drop_defaults(evaluated, example_inputs)
    rewrite_for_runtime(evaluated, operations)
    frozen = frozen_for("export_onnx", evaluated, operations)
    try:
        program = export_program(frozen, inputs, operations.opset, dynamic)
    except Exception as error:  # torch.onnx has its own types
        raise why_not_exported(model, example_inputs, error) from error
    exported, proto = program.exported_program, program.model_proto
    assert exported is not None
    refuse_lost_options(exported)
    if (opset := operations.written) < operations.opset:
        from qat.export.onnx.opsets import lower_opset

        lower_opset(proto, opset)
    name_quantizers(proto, frozen_grids(frozen))
    name_weights(proto)
    own_initializers(proto)  # after the names: copies get numbers behind them
    fix_sizes(exported, proto, dynamic)
    name_outputs(exported, proto)
    if {"height", "width"} & set(dynamic):
        check_other_sizes(model, proto.SerializeToString(), lambda *more: larger(example_inputs, dynamic, *more))
    return proto
