"""ONNX Runtime: the exported file against `quantize_static` of the same float model, and against its float file."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import qat
from benchmarks.deployment_models import float_model, prepared_model, random_images, size_of
from benchmarks.speed_rows import Row, timing_rows
from benchmarks.speed_timing import Call, Limits, contest
from qat.export.onnx.names import own_initializers
from qat.export.onnxruntime.default_session import needs_option
from qat.export.onnxruntime.session import open_session

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "vit_b_16")
BATCHES = (1, 8)
BASE = "quantize_static"


def rows(given: Any) -> Iterator[list[Row]]:
    """A comparison for each model, kind of session and batch."""
    for name in given.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            images = random_images(name, max(given.batch or BATCHES))
            files = written(float_model(name, images), images, Path(folder))
            for session in ("default", "exact") if needs_option() else ("default",):
                exact = session == "exact"
                operators = {each: dict(qat.export.optimized_operators(path)) for each, path in files.items()}
                for batch in given.batch or BATCHES:
                    limits = Limits(given.rounds, given.seconds, repeats=3 if batch == 1 else 1)
                    about = {"subject": name, "batch": batch, "size": size_of(name), "session": session}
                    makers = {each: partial(_call, path, exact, images[:batch]) for each, path in files.items()}
                    found = timing_rows("onnxruntime", about, BASE, contest(makers, BASE, limits))
                    yield [{**row, "operators": operators[row["variant"]]} for row in found]


def written(model: nn.Module, images: Tensor, folder: Path) -> dict[str, Path]:
    """The float file, that of quantize_static, and ours."""
    files = {name: folder / f"{name}.onnx" for name in ("float", "quantize_static", "qat")}
    torch.onnx.export(
        model,
        (images[:2],),
        files["float"],
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    quantize_static(files["float"], files["quantize_static"], images)
    qat.export_onnx(prepared_model(model, images), files["qat"], images)
    return files


def quantize_static(source: Path, target: Path, images: Tensor) -> None:
    """ONNX Runtime's own quantization, as its documentation advises for x86, on the images that calibrate ours.

    The integers stay as they are, but no two weights share a tensor: an exact session refuses such files.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
    from onnxruntime.quantization import quantize_static as quantize
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """The images, once."""

        def __init__(self, name: str) -> None:
            self._left = iter([{name: images.numpy()}])

        def get_next(self) -> dict[str, Any] | None:
            return next(self._left, None)

    processed = target.with_name("processed.onnx")
    quant_pre_process(source, processed)
    quantize(
        processed,
        target,
        Reader(onnx.load(processed, load_external_data=False).graph.input[0].name),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )
    proto = onnx.load(target)
    own_initializers(proto)
    onnx.save(proto, target)


def _call(path: Path, exact: bool, images: Tensor) -> Call:
    session = open_session(path, exact=exact, threads=1)
    feed = {session.get_inputs()[0].name: np.ascontiguousarray(images.numpy())}
    return lambda: session.run(None, feed)
