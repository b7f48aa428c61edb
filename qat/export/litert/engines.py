"""Engines for .tflite files: XNNPACK, LiteRT's reference kernels, TFLite Micro."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.export.litert.file import HIGHEST, LOWEST, Array, ReadFile
from qat.export.litert.values import layout
from qat.inputs import as_arguments
from qat.torch_internals import pytree

ENGINES = ("xnnpack", "reference", "micro")
"""What LiteRT runs by default; the kernels that define its operators; and those of microcontrollers."""

ARENA = 64 * 2**20
"""Bytes for all tensors of a file in the interpreter for microcontrollers, which asks for a number."""


def open_engine(data: bytes, engine: str, threads: int | None = None) -> Callable[[Sequence[Array]], list[Array]]:
    """A function from inputs to outputs, in the file's layouts; `threads` are LiteRT's."""
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
    inputs, outputs = (
        [each["index"] for each in ends] for ends in (made.get_input_details(), made.get_output_details())
    )

    def run(values: Sequence[Array]) -> list[Array]:
        for index, value in zip(inputs, values, strict=True):
            made.set_tensor(index, value)
        made.invoke()
        return [np.array(made.get_tensor(index)) for index in outputs]

    return run


def open_micro(data: bytes) -> Any:
    """The interpreter for microcontrollers."""
    try:
        from tflite_micro.python.tflite_micro import runtime
    except ImportError:
        raise ImportError("the engine 'micro' is not installed; pip install ste-qat[litert]") from None
    try:
        return runtime.Interpreter.from_bytes(data, arena_size=ARENA)
    except RuntimeError:
        raise ValueError(f"TensorFlow Lite Micro lacks what it printed above, or more than {ARENA >> 20} MiB") from None


class TorchFile:
    """A file in an engine, called as its model is, with any multiple of its batch.

    With `codes`, outputs that are integers are not made the values that they stand for.
    """

    def __init__(self, data: bytes, engine: str, threads: int | None = None, codes: bool = False) -> None:
        self._read, self._run, self._codes = ReadFile(data), open_engine(data, engine, threads), codes

    def __call__(self, inputs: Any) -> list[Tensor]:
        """The outputs, with axes as torch has them."""
        args, options = as_arguments(inputs)
        if options.keys() == set(self._read.input_names):
            args, options = tuple(options[name] for name in self._read.input_names), {}
        leaves = pytree.tree_leaves((args, options))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        wanted, got = (
            [tuple(map(int, each.shape)) for each in self._read.inputs],
            [tuple(each.shape) for each in tensors],
        )
        given, batch = [_as_stored(*each) for each in zip(tensors, self._read.inputs, strict=False)], wanted[0][0]
        if len(got) != len(wanted) or any(a.shape[1:] != b[1:] for a, b in zip(given, wanted, strict=True)):
            raise ValueError(f"the .tflite file stores inputs of the shapes {wanted}, got tensors of {got}")
        parts = [self._run([each[start : start + batch] for each in given]) for start in range(0, len(given[0]), batch)]
        together = [np.concatenate(each) for each in zip(*parts, strict=True)]
        return [_as_torch(*each, self._codes) for each in zip(together, self._read.outputs, strict=True)]


def _as_stored(x: Tensor, end: Any) -> Array:
    values: Array = x.detach().cpu().permute(layout(x.dim())).contiguous().numpy()
    if (grid := end.quantization) is None or grid.scale is None:
        return values
    codes = np.round(values / np.float32(grid.scale[0])) + grid.zeroPoint[0]
    return np.asarray(np.clip(codes, LOWEST, HIGHEST), np.int8)


def _as_torch(values: Array, end: Any, codes: bool) -> Tensor:
    if not codes and (grid := end.quantization) is not None and grid.scale is not None:
        values = (values.astype(np.float32) - grid.zeroPoint[0]) * np.float32(grid.scale[0])
    return torch.from_numpy(values).permute(np.argsort(layout(values.ndim)).tolist()).contiguous()
