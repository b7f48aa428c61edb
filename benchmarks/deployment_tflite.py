"""LiteRT: the exported .tflite file against ai-edge-quantizer's of the same float model, and against the float file."""

import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import qat
from benchmarks.deployment_cifar import SUBJECT, Split, cifar, float_resnet20
from benchmarks.deployment_float_litert import float_file
from benchmarks.deployment_models import float_model, prepared_model, random_images
from benchmarks.speed_rows import Row, timing_rows
from benchmarks.speed_timing import Call, Limits, contest
from qat.export.litert.engines import TorchFile, open_engine
from qat.export.litert.reading import ReadFile

BASE = "ai_edge_quantizer"
MODELS = ("mobilenet_v2",)


def rows(given: Any) -> Iterator[list[Row]]:
    """ResNet-20, with how often the files are right; models of torchvision."""
    if given.weights is not None:
        calibration, split = cifar(given.images)
        yield _rows(given, SUBJECT, float_resnet20(given.weights), calibration, split)
    for name in given.models or MODELS:
        images = random_images(name)
        yield _rows(given, name, float_model(name, images), images, None)


def _rows(given: Any, subject: str, model: nn.Module, images: Tensor, split: Split | None) -> list[Row]:
    about = {"subject": subject, "batch": 1, "size": images.shape[-1]}
    with tempfile.TemporaryDirectory() as folder:
        files, version = _written(model, images, Path(folder), given.quantizer)
    limits = Limits(given.rounds, given.seconds, repeats=20)
    makers = {name: partial(_call, data, images[:1]) for name, data in files.items()}
    found = timing_rows("tflite", about, BASE, contest(makers, BASE, limits))
    for row in found:
        data = files[row["variant"]]
        row |= {
            "bytes": len(data),
            "operators": [name for name, _ in ReadFile(data).operators()],
            "ai_edge_quantizer": version,
        }
        if split is not None:
            answers = TorchFile(data, "xnnpack")(split.images)[0].argmax(1)
            row["top1"] = 100 * float((answers == split.labels).double().mean())
    return found


def _written(model: nn.Module, images: Tensor, folder: Path, interpreter: Path) -> tuple[dict[str, bytes], str]:
    """The float file, ai-edge-quantizer's and ours; and its version."""
    source, arrays, target, own = (
        folder / name for name in ("float.tflite", "images.npy", "int8.tflite", "own.tflite")
    )
    source.write_bytes(float_file(model, images[:1]))
    np.save(arrays, images.permute(0, 2, 3, 1)[:, None].contiguous().numpy())
    script = Path(__file__).with_name("deployment_quantizer.py")
    done = subprocess.run([interpreter, script, source, arrays, target], text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"ai-edge-quantizer: {done.stderr[-2000:]}")
    qat.export_litert(prepared_model(model, images, "litert"), own, images)
    files = {"float": source, BASE: target, "qat": own}
    return {name: path.read_bytes() for name, path in files.items()}, done.stdout.split()[-1]


def _call(data: bytes, image: Tensor) -> Call:
    run = open_engine(data, "xnnpack", threads=1)
    given = image.permute(0, 2, 3, 1).contiguous().numpy()
    return lambda: run([given])
