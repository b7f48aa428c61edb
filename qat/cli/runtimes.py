"""Runtimes that `--runtime` names, and sessions in them."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from qat.export.litert.engines import TorchFile
from qat.export.litert.file import ReadFile
from qat.export.onnxruntime.session import default_is_exact, needs_option, open_session
from qat.text import first_line
from qat.training.errors import UserError
from qat.training.run.folder import MODEL

Array = npt.NDArray[Any]
Opened = tuple[Callable[[Array], list[Array]], list[str], list[tuple[int, ...]]]
TFLITE = "model.tflite"

# Property of OpenVINO's CPU plugin: compute on floats that lie on the grids. Its integer kernels (oneDNN's) add pairs
# of products in 16 bits on x86 without VNNI, as ONNX Runtime's do, and it has no others.
EXACT_IN_OPENVINO = ("LP_TRANSFORMS_MODE", "NO")


@dataclass(frozen=True)
class Runtime:
    """Runtime of a run's file."""

    title: str
    package: str
    file: str = MODEL  # that it reads in a run folder
    engine: str | None = None  # of LiteRT


RUNTIMES = {
    "onnxruntime": Runtime("ONNX Runtime", "onnxruntime"),
    "openvino": Runtime("OpenVINO", "openvino"),
    "litert": Runtime("LiteRT", "ai-edge-litert", TFLITE, "xnnpack"),
    "litert_reference": Runtime("LiteRT's reference kernels", "ai-edge-litert", TFLITE, "reference"),
    "tflite_micro": Runtime("TensorFlow Lite Micro", "tflite-micro", TFLITE, "micro"),
}


@dataclass(frozen=True)
class Session:
    """Open file with one input of images."""

    shape: tuple[int, ...]  # of the input; 0 for a free axis
    pixels: bool  # the input is uint8
    run: Callable[[Array], list[Array]]


def default_differs(runtime: str) -> bool:
    """Return True if sessions without options do not multiply exactly here."""
    return runtime in RUNTIMES and RUNTIMES[runtime].file == MODEL and not default_is_exact()


def notes_of(path: Path) -> dict[str, Any]:
    if path.suffix == Path(TFLITE).suffix:
        return ReadFile(path.read_bytes()).notes()
    noted = open_session(path).get_modelmeta().custom_metadata_map
    return {key: json.loads(text) for key, text in noted.items()}


def open_file(path: Path, runtime: str, *, exact: bool = True, threads: int = 0) -> Session:
    """Open a session on the CPU; without `exact` it multiplies as by default."""
    known = RUNTIMES[runtime]
    try:
        if known.engine:
            compute, kinds, shapes = _in_litert(path, known.engine, threads)
        else:
            compute, kinds, shapes = (_in_openvino if runtime == "openvino" else _in_onnxruntime)(path, exact, threads)
    except ImportError:
        raise UserError(f"--runtime: {runtime} is not installed; pip install {known.package}") from None
    except Exception as error:  # each runtime has its own types
        raise UserError(f"{path}: {known.title} does not open it: {first_line(error)}") from error
    if kinds not in (["float32"], ["uint8"]) or len(shapes[0]) != 4:
        named = " and ".join(f"{len(shape)}-D {kind}" for kind, shape in zip(kinds, shapes, strict=True))
        raise UserError(f"{path}: takes {named}; this is for files of one input of images, 4-D float32 or uint8")

    def run(images: Array) -> list[Array]:
        try:
            return compute(images)
        except Exception as error:
            raise UserError(f"{path}: does not run with images {images.shape}: {first_line(error)}") from error

    return Session(shapes[0], kinds == ["uint8"], run)


def _in_onnxruntime(path: Path, exact: bool, threads: int) -> Opened:
    session = open_session(path, exact=exact, threads=threads)
    name = session.get_inputs()[0].name
    return lambda images: [np.asarray(each) for each in session.run(None, {name: images})], *_inputs(path)


def _in_openvino(path: Path, exact: bool, threads: int) -> Opened:
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}  # bfloat16 by default where the processor has it
    options |= dict([EXACT_IN_OPENVINO]) if exact and needs_option() else {}
    options |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
    compiled = _core().compile_model(str(path), "CPU", options)
    return lambda images: [np.array(each) for each in compiled(images).values()], *_inputs(path)


def _in_litert(path: Path, engine: str, threads: int) -> Opened:
    data = path.read_bytes()
    file, inputs = TorchFile(data, engine, threads or None), ReadFile(data).inputs
    # `TorchFile` takes floats where the file has integer ends.
    kinds = ["float32" if each.type == 0 or each.quantization is not None else f"type {each.type}" for each in inputs]
    shapes = [tuple(map(int, each.shape)) for each in inputs]
    turned = [(n, *rest[-1:], *rest[:-1]) for n, *rest in shapes]
    return lambda images: [each.numpy() for each in file(torch.from_numpy(images))], kinds, turned


def _inputs(path: Path) -> tuple[list[str], list[tuple[int, ...]]]:
    import onnx

    inputs = [end.type.tensor_type for end in onnx.load(path, load_external_data=False).graph.input]
    kinds = [np.dtype(onnx.helper.tensor_dtype_to_np_dtype(each.elem_type)).name for each in inputs]
    return kinds, [tuple(axis.dim_value for axis in each.shape.dim) for each in inputs]


# One for the process: after two that end in the order in which they began, the next signal (Ctrl-C) crashes.
@functools.cache
def _core() -> Any:
    import openvino

    return openvino.Core()
