"""One trained model in every engine: the classes of a whole validation split, and the integers of every layer."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qat
from benchmarks.deployment_cifar import SUBJECT, Split, cifar, float_resnet20, validation
from benchmarks.deployment_models import prepared_model
from benchmarks.speed_rows import Row, missing_rows
from benchmarks.speed_timing import reason
from qat.cli.runs import open_file, open_run
from qat.export import LayerDifference, compare_layers, compare_litert_layers
from qat.export.litert.engines import ENGINES, TorchFile

CHUNK = 50
"""Images that run at once, so that the integers of all layers fit into memory."""

Compute = Callable[[Tensor], Tensor]


def rows(given: Any) -> Iterator[list[Row]]:
    """ResNet-20 calibrated for LiteRT, if there are weights; a trained run, if there is one."""
    if given.weights is not None:
        calibration, split = cifar(given.images)
        model = prepared_model(float_resnet20(given.weights), calibration, "litert")
        yield from rows_of(SUBJECT, model, split, given.engines)
    if given.run is not None:
        run = open_run(str(given.run))
        subject = f"{run.config.model.name}, {run.config.data.name}"
        yield from rows_of(subject, run.quantized, validation(run.data([])), given.engines)


def rows_of(subject: str, model: nn.Module, split: Split, engines: Sequence[str] | None) -> Iterator[list[Row]]:
    """A row for each engine, or for those that are named."""
    about = {"subject": subject, "size": split.images.shape[-1], "samples": len(split.labels)}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        expected = _in_chunks(model, split.images)
        for name, maker in _engines(model, split.images[:1], Path(folder)).items():
            if engines is not None and name not in engines:
                continue
            try:
                compute, compare = maker()
                logits = _in_chunks(compute, split.images)
                layers = None if compare is None else _layers(map(compare, torch.split(split.images, CHUNK)))
            except Exception as error:
                yield missing_rows("engines", about, "eval", {name: reason(error)})
            else:
                answers = _answers(expected, logits, split.labels)
                yield [{"case": "engines", **about, "variant": name, "base": "eval", **answers, **(layers or {})}]


def _engines(model: nn.Module, example: Tensor, folder: Path) -> dict[str, Callable[[], tuple[Compute, Any]]]:
    """For every engine what makes its function from images to logits, and one from images to layers' differences."""
    onnx, litert = folder / "model.onnx", folder / "model.tflite"

    def onnx_file() -> Path:
        if not onnx.exists():
            qat.export_onnx(model, onnx, example)
        return onnx

    def litert_file() -> Path:
        if not litert.exists():
            qat.export_litert(model, litert, example)
        return litert

    def session(runtime: str, exact: bool = True) -> Compute:
        run = open_file(onnx_file(), runtime, exact=exact, threads=1).run
        return lambda images: torch.from_numpy(run(images.numpy()))

    def litert_engine(engine: str) -> tuple[Compute, Any]:
        file = TorchFile(litert_file().read_bytes(), engine)
        return lambda images: file(images)[0], partial(_litert_layers, litert, model, engine)

    return {
        "eval": lambda: (model, None),
        "convert_reference": lambda: (qat.convert(model, "reference"), None),
        "convert_onednn": lambda: (qat.convert(model), None),
        "onnxruntime": lambda: (session("onnxruntime"), lambda images: compare_layers(onnx, model, images)),
        "onnxruntime_default": lambda: (
            session("onnxruntime", exact=False),
            lambda images: compare_layers(onnx, model, images, default_session=True),
        ),
        "openvino": lambda: (session("openvino"), None),
        **{f"litert_{engine}": partial(litert_engine, engine) for engine in ENGINES},
    }


def _litert_layers(path: Path, model: nn.Module, engine: str, images: Tensor) -> list[LayerDifference]:
    return compare_litert_layers(path, model, images, engine=engine)


def _in_chunks(compute: Compute, images: Tensor) -> Tensor:
    return torch.cat([compute(chunk.contiguous()) for chunk in torch.split(images, CHUNK)])


def _answers(expected: Tensor, logits: Tensor, labels: Tensor) -> Row:
    """Percent correct, equal classes, and how many of the others are ties: torch finds both classes equally likely."""
    ours, theirs = expected.argmax(1), logits.argmax(1)
    tied = expected.gather(1, theirs[:, None])[:, 0] == expected.amax(1)
    return {
        "top1": 100 * float((theirs == labels).double().mean()),
        "equal": int((ours == theirs).sum()),
        "ties": int(((ours != theirs) & tied).sum()),
        "largest_gap": float((expected - logits).abs().max()),
    }


def _layers(chunks: Iterable[list[LayerDifference]]) -> Row:
    """Of all layers together: integers, how many differ, by how many levels at most, and how many are no near-ties."""
    every = [layer for chunk in chunks for layer in chunk]
    return {
        "integers": sum(layer.elements for layer in every),
        "differing": sum(layer.differing for layer in every),
        "largest": max(layer.largest for layer in every),
        "beyond_ties": sum(layer.beyond_ties for layer in every),
    }
