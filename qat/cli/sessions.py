"""A model.onnx in ONNX Runtime or OpenVINO: as its answers are proven, and as the runtime opens it by default."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qat.export.onnxruntime.default_session import needs_option
from qat.export.onnxruntime.session import open_session
from qat.text import first_line
from qat.training.errors import UserError

Array = npt.NDArray[Any]

RUNTIMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""What `--runtime` calls them, and their names."""

EXACT_IN_OPENVINO = ("LP_TRANSFORMS_MODE", "NO")
"""Property of OpenVINO's CPU plugin: compute on floats that lie on the grids. Its integer kernels (oneDNN's) add pairs
of products in 16 bits on x86 without VNNI, as ONNX Runtime's do, and it has no others."""


@dataclass(frozen=True)
class Session:
    """A file of one input of images: its shape (0 for a free axis), whether it takes uint8 pixels, and how it runs."""

    shape: tuple[int, ...]
    pixels: bool
    run: Callable[[Array], Array]


def open_file(path: Path, runtime: str, *, exact: bool = True, threads: int = 0) -> Session:
    """A session on the CPU; without `exact` it multiplies as the runtime does by default. `threads` 0: its choice."""
    import onnx

    try:
        compute = (_in_openvino if runtime == "openvino" else _in_onnxruntime)(path, exact, threads)
        inputs = [end.type.tensor_type for end in onnx.load(path).graph.input]
        kinds = [np.dtype(onnx.helper.tensor_dtype_to_np_dtype(each.elem_type)).name for each in inputs]
    except ImportError:
        raise UserError(f"--runtime: {runtime} is not installed; pip install {runtime}") from None
    except Exception as error:  # each runtime has its own
        raise UserError(f"{path}: {RUNTIMES[runtime]} does not open it: {first_line(error)}") from error
    shapes = [tuple(axis.dim_value for axis in each.shape.dim) for each in inputs]
    if kinds not in (["float32"], ["uint8"]) or len(shapes[0]) != 4:
        named = " and ".join(f"{len(shape)}-D {kind}" for kind, shape in zip(kinds, shapes, strict=True))
        raise UserError(f"{path}: takes {named}; this is for files of one input of images, 4-D float32 or uint8")

    def run(images: Array) -> Array:
        try:
            return compute(images)
        except Exception as error:
            raise UserError(f"{path}: does not run with images {images.shape}: {first_line(error)}") from error

    return Session(shapes[0], kinds == ["uint8"], run)


def _in_onnxruntime(path: Path, exact: bool, threads: int) -> Callable[[Array], Array]:
    session = open_session(path.read_bytes(), exact=exact, threads=threads)
    name = session.get_inputs()[0].name
    return lambda images: np.asarray(session.run(None, {name: images})[0])


def _in_openvino(path: Path, exact: bool, threads: int) -> Callable[[Array], Array]:
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}  # bfloat16 by default where the processor has it
    options |= dict([EXACT_IN_OPENVINO]) if exact and needs_option() else {}
    options |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
    compiled = _core().compile_model(str(path), "CPU", options)
    return lambda images: np.array(compiled(images)[0])


@functools.cache
def _core() -> Any:
    """One for the process: where two end in the order in which they began, the next signal (Ctrl-C) is a crash."""
    import openvino

    return openvino.Core()
