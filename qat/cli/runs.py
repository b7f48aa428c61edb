"""Run folder or file that RUN names, and arguments that several verbs share."""

import argparse
import json
import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import qat
from qat.cli.runtimes import RUNTIMES, TFLITE, notes_of, open_file
from qat.text import printable
from qat.training.config.file import load_config
from qat.training.config.schema import QuantizationConfig, RunConfig
from qat.training.data.images import InputTransform
from qat.training.data.loaders import Data, load_data
from qat.training.data.transforms import ToInput
from qat.training.errors import UserError, looked_in, value_errors_reported
from qat.training.model import build_model, load_weights, prepare_model
from qat.training.run.checkpoint import preprocessing_of
from qat.training.run.folder import (
    FLOAT_WEIGHTS,
    LAST_CHECKPOINT,
    MODEL,
    RESOLVED_CONFIG,
    Json,
    read_summary,
    write_text,
)
from qat.training.tasks.known import CLASSIFICATION, TASKS
from qat.training.tasks.task import Task

WRITERS = {
    MODEL: "train.py writes it with resume=auto export.onnx=true",
    TFLITE: "python -m qat export {0} --target litert writes it",
}

HINT = "or a model.onnx or model.tflite"


def add_run(parser: argparse.ArgumentParser, overrides: bool = False) -> None:
    """Add RUN, the code of the user that it needs, and changes of its config."""
    parser.add_argument("run_path", metavar="RUN", help=f"a run folder of train.py, {HINT} where that is enough")
    builder = "builds the float model, in place of model.name"
    parser.add_argument("--model", metavar="PACKAGE.MODULE:CALLABLE", help=builder)
    own = "MODULE registers rules or targets, for runs with imports; MODULE:CALLABLE is its model.name or data.name"
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="CODE", help=own)
    if overrides:
        text = "changes of the run's config: data.root=..."
        parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=text)


def count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999999")
    return int(text)


def counts(text: str) -> list[int]:
    return list(dict.fromkeys(count(number) for number in text.split(",")))


def number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a number")
    return value


def check_folder_of(option: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option}: '{path}': there is no folder '{path.parent}' to write to; create it first")


Engine: TypeAlias = Callable[[Tensor], Any]  # from images (N, 3, H, W) float32 to the answers of the task


@dataclass(frozen=True)
class Run:
    """Run folder, or its exported file alone."""

    path: Path
    builder: str | None = None  # `package.module:callable` of the user's own float model

    @property
    def folder(self) -> Path:
        if not self.path.is_dir():
            needs = "this needs the folder of its run, with its data and weights"
            raise UserError(f"RUN: '{self.path}' is a file; {needs}")
        return self.path

    def file(self, runtime: str) -> Path:
        """Return the integer model that a runtime reads; UserError if there is none."""
        name = RUNTIMES[runtime].file
        if not self.has(runtime):
            if self.path.is_file():
                raise UserError(f"--runtime: {runtime} reads {Path(name).suffix} files, and RUN is '{self.path}'")
            writer = WRITERS[name].format(self.path)
            raise UserError(f"RUN: '{self.path}' has no {name}; {writer}, or use --runtime torch")
        return self.path / name if self.path.is_dir() else self.path

    def has(self, runtime: str) -> bool:
        name = RUNTIMES[runtime].file
        return (self.path / name).is_file() if self.path.is_dir() else self.path.suffix == Path(name).suffix

    @property
    def runtime(self) -> str:
        """Default runtime: the first that reads the file, or torch without a file."""
        return next((name for name in RUNTIMES if self.has(name)), "torch")

    @cached_property
    def config(self) -> RunConfig:
        return load_config(str(self.folder / RESOLVED_CONFIG))

    @cached_property
    def task(self) -> Task:
        """What the model has learned; that of boxes needs the folder, to decode them."""
        if self.path.is_dir():
            task = self.config.task
            return task.bound(self.quantized) if task.kind == "boxes" else task  # loading a model takes seconds
        return next(task for task in TASKS if task.name == self.about.get("task", CLASSIFICATION.name))

    @cached_property
    def quantized(self) -> nn.Module:
        given = self._build() if ":" in self.config.model.name else None  # `qat.load` imports no user's code
        with warnings.catch_warnings(), value_errors_reported("RUN: "):
            warnings.simplefilter("ignore", UserWarning)  # an unfinished run may be measured too
            return qat.load(self.folder, given)

    @cached_property
    def classes(self) -> list[str]:
        return list(map(printable, self.about["classes"]))

    @cached_property
    def transform(self) -> InputTransform:
        with value_errors_reported(f"RUN: '{self.path}': "):
            return InputTransform(preprocessing_of(self.about))

    @cached_property
    def about(self) -> Json:
        """Classes and preprocessing, as the file or the summary has them."""
        if self.runtime != "torch":
            about = notes_of(self.file(self.runtime))
        else:
            about = (read_summary(self.folder) or {}).get("about", {})
        if "classes" not in about:
            unfinished = ": the run is not finished; train.py finishes it with resume=auto"
            other = " does not say its classes and preprocessing; is it of train.py?"
            raise UserError(f"RUN: '{self.path}'{unfinished if (self.folder / LAST_CHECKPOINT).is_file() else other}")
        return about

    def engine(self, runtime: str, *, exact: bool = True) -> Engine:
        """Return the model in a runtime; `float` is the float model, in torch."""
        task = self.task
        if runtime in RUNTIMES:
            session = open_file(self.file(runtime), runtime, exact=exact)

            def run(images: Tensor) -> Any:
                given = self.as_pixels(images) if session.pixels else images.contiguous()
                return task.answers([torch.from_numpy(each) for each in session.run(given.numpy())], images)

            return run
        model = self.float_model if runtime == "float" else self.quantized
        return lambda images: in_torch(model, images, task)

    def as_pixels(self, images: Tensor) -> Tensor:
        """Return the uint8 pixels (N, H, W, 3) of normalised images (N, 3, H, W)."""
        kept = self.transform.preprocessing
        return ToInput(kept.mean, kept.std).undone(images).permute(0, 2, 3, 1).contiguous()

    @cached_property
    def float_model(self) -> nn.Module:
        file, model = self.folder / FLOAT_WEIGHTS, self._build()
        load_weights(model, str(file), self.config.model.name, "RUN")
        return model.eval()

    def calibrated(self, data: Data, changed: QuantizationConfig | None = None) -> nn.Module:
        """Return the model as QAT began, with its grids or `changed` ones."""
        given = changed or self.config.quantization
        config = self.config.model_copy(update={"quantization": given})
        model = prepare_model(self.float_model, config, data.image_shape)
        with value_errors_reported("RUN: "):
            steps = [step.build() for step in given.calibration_steps]
            qat.calibrate(model, data.calibration(given.calibration_batches), steps=steps)
        return model

    def keep(self, file: str, results: Json) -> None:
        """Keep results of a verb in the run folder, for its report."""
        if self.path.is_dir():
            write_text(self.path / file, json.dumps(results, indent=1) + "\n")

    def data(self, overrides: list[str]) -> Data:
        """Load the data of the run; overrides say where they lie now."""
        config = load_config(str(self.folder / RESOLVED_CONFIG), overrides)
        data = load_data(config.data, config.seed, torch.device("cpu"), config.channels_last, config.task.kind)
        # Another folder may have other classes, whose labels would be others too.
        if data.classes != self.classes:
            counts = f"{len(data.classes)} classes, the model has {len(self.classes)}"
            raise UserError(f"data: {counts}; set data.root to its own")
        return data

    def _build(self) -> nn.Module:
        config = self.config.model
        if ":" in config.name and self.builder is not None:
            config = config.model_copy(update={"name": self.builder})
        return build_model(config, len(self.classes), with_weights=False)


def open_run(path: str, builder: str | None = None) -> Run:
    file = Path(os.path.expanduser(path))
    if not file.exists():
        raise UserError(f"RUN: '{path}' does not exist{looked_in(file)}; give a run folder of train.py, {HINT}")
    if file.is_dir() and not (file / RESOLVED_CONFIG).is_file():
        raise UserError(f"RUN: '{path}' has no {RESOLVED_CONFIG}; give the folder of a run of train.py, {HINT}")
    if file.is_file() and file.suffix not in (".onnx", ".tflite"):
        raise UserError(f"RUN: '{path}' is no .onnx or .tflite file; give the folder of a run of train.py, {HINT}")
    return Run(file, builder)


def in_torch(model: nn.Module, images: Tensor, task: Task = CLASSIFICATION) -> Any:
    with torch.no_grad():
        return task.answers(model(images), images)
