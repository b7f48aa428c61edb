"""A model.onnx in ONNX Runtime or OpenVINO: as its answers are proven, and as the runtime opens it by default."""

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
    """A file of one input of images.

    Attributes:
        shape: of the input; None for a free axis.
        pixels: whether it takes uint8 pixels, as of an export with `normalization`, and not float32.
        compute: from such an array to the first output.
    """

    shape: tuple[int | None, ...]
    pixels: bool
    compute: Callable[[Array], Array]

    def run(self, images: Array) -> Array:
        """The scores of images.

        Raises:
            UserError: if the file does not run with them.
        """
        try:
            return self.compute(images)
        except Exception as error:  # each runtime has its own
            raise UserError(f"RUN: the file does not run with images {images.shape}: {first_line(error)}") from error


def open_file(path: Path, runtime: str, *, exact: bool = True, threads: int = 0) -> Session:
    """A session on the CPU.

    Args:
        path: the file.
        runtime: one of `RUNTIMES`.
        exact: with exact integer products on every processor; false: as the runtime multiplies by default.
        threads: 0 for as many as the runtime takes.

    Raises:
        UserError: if the runtime is not installed, does not read the file, or has no exact products here; or if the
            file has other inputs than one of images.
    """
    try:
        ends, compute = (_in_openvino if runtime == "openvino" else _in_onnxruntime)(path, exact, threads)
    except ImportError:
        raise UserError(f"--runtime: {runtime} is not installed; pip install {runtime}") from None
    except Exception as error:  # each runtime has its own
        raise UserError(f"{path}: {RUNTIMES[runtime]} does not open it: {first_line(error)}") from error
    if len(ends) != 1 or len(ends[0][0]) != 4 or ends[0][1] not in ("float32", "uint8"):
        kinds = ", ".join(f"{kind} {list(shape)}" for shape, kind in ends)
        raise UserError(f"{path}: takes {kinds}; this is for files of one input of images, float32 or uint8")
    return Session(ends[0][0], ends[0][1] == "uint8", compute)


def _in_onnxruntime(path: Path, exact: bool, threads: int) -> tuple[list[Any], Callable[[Array], Array]]:
    session = open_session(path.read_bytes(), exact=exact, threads=threads)
    names = {"tensor(float)": "float32"}
    ends = [
        (tuple(side if isinstance(side, int) else None for side in end.shape), names.get(end.type, end.type[7:-1]))
        for end in session.get_inputs()
    ]
    name = session.get_inputs()[0].name
    return ends, lambda images: np.asarray(session.run(None, {name: images})[0])


def _in_openvino(path: Path, exact: bool, threads: int) -> tuple[list[Any], Callable[[Array], Array]]:
    import openvino

    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}  # bfloat16 by default where the processor has it
    options |= dict([EXACT_IN_OPENVINO]) if exact and needs_option() else {}
    options |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
    compiled = openvino.Core().compile_model(str(path), "CPU", options)
    ends = [
        (
            tuple(side.get_length() if side.is_static else None for side in end.partial_shape),
            np.dtype(end.element_type.to_dtype()).name,
        )
        for end in compiled.inputs
    ]
    return ends, lambda images: np.array(compiled(images)[0])
