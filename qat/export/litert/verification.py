"""`verify_litert`, `compare_litert_layers`: a .tflite file against its torch model."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat.contexts import evaluating, in_full_precision
from qat.export.agreement import Follow, Verification, answers, judge
from qat.export.checks import check_finite
from qat.export.litert.engines import TorchFile
from qat.export.litert.file import HIGHEST, ReadFile
from qat.inputs import Batch, as_batches, check_model, run_batch
from qat.integers.evaluation import evaluation_copy, quantizer_calls
from qat.integers.following import Follower, LayerDifference
from qat.integers.frozen import stored_offset
from qat.torch_internals import pytree


@in_full_precision
def verify_litert(
    path: str | os.PathLike[str], model: torch.nn.Module, batches: Iterable[Batch], *, engine: str = "xnnpack"
) -> Verification:
    """Run a file over the batches and compare its answers with the model's.

    Args:
        path: the file of `export_litert`.
        model, batches: as for `verify_onnx`.
        engine: "xnnpack" (LiteRT's default), "reference" (its reference kernels) or "micro" (TensorFlow Lite Micro).

    Raises:
        ImportError: if the engine is not installed.
        ValueError, FileNotFoundError: as `verify_onnx`.
    """
    given, run = as_batches(verify_litert, model, batches), TorchFile(Path(path).read_bytes(), engine)
    check_finite(model, "verify_litert")
    with evaluating(model), torch.no_grad():
        return judge([answers("verify_litert", run, model, batch)[1] for batch in given])


@in_full_precision
def compare_litert_layers(
    path: str | os.PathLike[str], model: torch.nn.Module, inputs: Any, *, engine: str = "xnnpack"
) -> list[LayerDifference]:
    """Compare every quantizer's integers between an engine and torch, layer by layer.

    `qat.export.compare_layers` for .tflite files: what it says holds here too.

    Args:
        path, model, engine: as for `verify_litert`.
        inputs: one batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
    """
    check_model(compare_litert_layers, model)
    return litert_following(path, model, engine)(inputs)[0]


def litert_following(path: str | os.PathLike[str], model: torch.nn.Module, engine: str) -> Follow:
    """`Follow` of a .tflite file in an engine."""
    copied, file = evaluation_copy(model, fold_quantizers=True), ReadFile(Path(path).read_bytes())
    calls = quantizer_calls(copied)
    paths = {name: path for path, names in calls.items() for name in names if name in file.names}
    answers = TorchFile(Path(path).read_bytes(), engine)
    codes_of = TorchFile(file.with_outputs([*paths]), engine, codes=True)

    def follow(inputs: Any) -> tuple[list[LayerDifference], list[tuple[Tensor, Tensor]]]:
        integers = {}
        for (name, quantizer_path), codes in zip(paths.items(), codes_of(inputs), strict=True):
            quantizer: Any = copied.get_submodule(quantizer_path)
            # The follower takes integers as `stored_qparams` does; a file has the highest at 127.
            shift = HIGHEST - quantizer.bounds()[1] - stored_offset(quantizer)
            integers[name] = codes.int() - shift
        follower = Follower(calls, integers, Path(path).name)
        with follower.following(copied), torch.no_grad():
            found = pytree.tree_leaves(run_batch("compare_litert_layers", copied, inputs))
        return follower.differences, [(a.float(), b) for a, b in zip(found, answers(inputs), strict=True)]

    return follow
