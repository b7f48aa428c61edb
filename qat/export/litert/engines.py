"""Engines for .tflite files: XNNPACK, reference kernels, TensorFlow Lite Micro."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.contexts import evaluating, in_full_precision
from qat.export.agreement import Follow, Verification, answers, verdict_on
from qat.export.checks import check_finite
from qat.export.litert.file import HIGHEST, LOWEST, Array, ReadFile
from qat.export.litert.values import layout
from qat.inputs import Batch, Inputs, as_arguments, as_batches, check_model, run_batch
from qat.integers.evaluation import evaluation_copy, quantizer_calls
from qat.integers.following import Follower, LayerDifference
from qat.integers.frozen import stored_offset
from qat.quantizer import Quantizer
from qat.torch_internals import pytree

ENGINES = ("xnnpack", "reference", "micro")
"""LiteRT's default; the kernels that define its operators; the interpreter for microcontrollers."""

ARENA = 64 * 2**20
"""Bytes for all tensors of a file in the interpreter for microcontrollers, which does not size its arena itself."""


def open_engine(data: bytes, engine: str, threads: int | None = None) -> Callable[[Sequence[Array]], list[Array]]:
    """Return a function from inputs to outputs, both in the file's layouts."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if engine == "micro":
        micro, count = open_micro(data), len(ReadFile(data).outputs)

        def run_micro(values: Sequence[Array]) -> list[Array]:
            for number, value in enumerate(values):
                micro.set_input(value, number)
            micro.invoke()
            return [np.array(micro.get_output(number)) for number in range(count)]

        return run_micro
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kinds = {"xnnpack": OpResolverType.BUILTIN, "reference": OpResolverType.BUILTIN_REF}
    made = Interpreter(model_content=data, experimental_op_resolver_type=kinds[engine], num_threads=threads)
    made.allocate_tensors()
    inputs = [each["index"] for each in made.get_input_details()]
    outputs = [each["index"] for each in made.get_output_details()]

    def run(values: Sequence[Array]) -> list[Array]:
        for index, value in zip(inputs, values, strict=True):
            made.set_tensor(index, value)
        made.invoke()
        return [np.array(made.get_tensor(index)) for index in outputs]

    return run


def open_micro(data: bytes) -> Any:
    """Open a file in the interpreter for microcontrollers."""
    try:
        from tflite_micro.python.tflite_micro import runtime
    except ImportError:
        raise ImportError("the engine 'micro' is not installed; pip install ste-qat[litert]") from None
    try:
        return runtime.Interpreter.from_bytes(data, arena_size=ARENA)
    except RuntimeError:
        raise ValueError(f"TensorFlow Lite Micro lacks what it printed above, or more than {ARENA >> 20} MiB") from None


class TorchFile:
    """A file in an engine, called like its model, with any multiple of its batch.

    With `codes`, outputs that are integers stay integers; else they become the values that they stand for.
    """

    def __init__(self, data: bytes, engine: str, threads: int | None = None, codes: bool = False) -> None:
        self._read, self._run, self._codes = ReadFile(data), open_engine(data, engine, threads), codes

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        """Return the outputs, with axes in torch's order."""
        args, options = as_arguments(inputs)
        if options.keys() == set(self._read.input_names):
            args, options = tuple(options[name] for name in self._read.input_names), {}
        leaves = pytree.tree_leaves((args, options))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        wanted = [tuple(map(int, each.shape)) for each in self._read.inputs]
        got = [tuple(each.shape) for each in tensors]
        given = [_as_stored(*each) for each in zip(tensors, self._read.inputs, strict=False)]
        batch = wanted[0][0]  # a file takes batches of one size: more samples run in pieces
        if len(got) != len(wanted) or any(a.shape[1:] != b[1:] for a, b in zip(given, wanted, strict=True)):
            raise ValueError(f"the .tflite file stores inputs of the shapes {wanted}, got tensors of {got}")
        parts = [self._run([each[start : start + batch] for each in given]) for start in range(0, len(given[0]), batch)]
        together = [np.concatenate(each) for each in zip(*parts, strict=True)]
        return [_as_torch(*each, self._codes) for each in zip(together, self._read.outputs, strict=True)]


def _as_stored(x: Tensor, end: Any) -> Array:
    values: Array = x.detach().cpu().permute(layout(x.dim())).contiguous().numpy()
    if (grid := end.quantization) is None or grid.scale is None:
        return values
    codes = np.round(values / np.float32(grid.scale[0])) + grid.zeroPoint[0]  # in float32, halves to even, as torch
    return np.asarray(np.clip(codes, LOWEST, HIGHEST), np.int8)


def _as_torch(values: Array, end: Any, codes: bool) -> Tensor:
    if not codes and (grid := end.quantization) is not None and grid.scale is not None:
        values = (values.astype(np.float32) - grid.zeroPoint[0]) * np.float32(grid.scale[0])
    return torch.from_numpy(values).permute(np.argsort(layout(values.ndim)).tolist()).contiguous()


@in_full_precision
def verify_litert(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    batches: Iterable[Batch],
    *,
    engine: str = "xnnpack",
    classes: bool = True,
) -> Verification:
    """Run a file over the batches and compare its answers with the model's.

    Args:
        path: the file of `export_litert`.
        model, batches, classes: as for `verify_onnx`.
        engine: "xnnpack" (LiteRT's default), "reference" (its reference kernels) or "micro" (TensorFlow Lite Micro).

    Raises:
        ImportError: if the engine is not installed.
        ValueError, FileNotFoundError: as `verify_onnx`.
    """
    given, run = as_batches(verify_litert, model, batches), TorchFile(Path(path).read_bytes(), engine)
    check_finite(model, "verify_litert")
    with evaluating(model), torch.no_grad():
        return verdict_on([answers("verify_litert", run, model, batch)[1] for batch in given], classes=classes)


@in_full_precision
def compare_litert_layers(
    path: str | os.PathLike[str], model: torch.nn.Module, inputs: Inputs, *, engine: str = "xnnpack"
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
    """Return the `Follow` of a .tflite file in an engine."""
    copied, file = evaluation_copy(model, fold_quantizers=True), ReadFile(Path(path).read_bytes())
    calls = quantizer_calls(copied)
    paths = {name: path for path, names in calls.items() for name in names if name in file.names}
    run = TorchFile(Path(path).read_bytes(), engine)
    codes_of = TorchFile(file.with_outputs([*paths]), engine, codes=True)

    def follow(inputs: Inputs) -> tuple[list[LayerDifference], list[tuple[Tensor, Tensor]]]:
        integers = {}
        for (name, quantizer_path), codes in zip(paths.items(), codes_of(inputs), strict=True):
            quantizer = copied.get_submodule(quantizer_path)
            assert isinstance(quantizer, Quantizer)
            # The follower takes integers as `stored_qparams` does; a file has the highest at 127.
            shift = HIGHEST - quantizer.bounds()[1] - stored_offset(quantizer)
            integers[name] = codes.int() - shift
        follower = Follower(calls, integers, Path(path).name)
        with follower.following(copied), torch.no_grad():
            found = pytree.tree_leaves(run_batch("compare_litert_layers", copied, inputs))
        return follower.differences, [(a.float(), b) for a, b in zip(found, run(inputs), strict=True)]

    return follow
