"""Results and models of finished runs, kept for docs/measurements.md and for users who start from low-bit models.

    python train.py --config resnet20_cifar10_w4a4 run_dir=RUN data.root=CIFAR10.npz model.checkpoint=FILE.safetensors
    python -m benchmarks.accuracy RUN [--what "our recipe, at another rate"]   # a line of results/accuracy.jsonl
    python -m benchmarks.accuracy RUN --model                                  # its model too, into benchmarks/models
    python -m benchmarks.document

A line is called as its run (`name=`), and has one seed: several make the spread of a row. It says what was run, so that
a row can be run again; older lines have the config and what was changed (`overrides`).
"""

import argparse
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qat
from benchmarks.kept import RESULTS
from qat.training.config.file import load_config
from qat.training.config.schema import DataConfig, RunConfig
from qat.training.data.loaders import load_data
from qat.training.model import build_model
from qat.training.run.logging import CURVES

ROOT = Path(__file__).resolve().parents[1]
ACCURACY = RESULTS / "accuracy.jsonl"
MODELS = ROOT / "benchmarks" / "models"
STAGES = ("float", "float_finetune", "calibrated", "qat", "onnx")
LARGEST = 2_000_000
"""Bytes of a kept file."""


def opened(folder: Path) -> tuple[Any, nn.Module, RunConfig]:
    """The trained model of a run, its float model and its config."""
    config = load_config(str(folder / "config.yaml"))
    floating = build_model(config.model, 10, with_weights=False)
    model = qat.load(folder, floating)
    floating.load_state_dict(load_file(folder / "float.safetensors"))
    return model, floating, config


def predictions(model: nn.Module, config: DataConfig) -> np.ndarray:
    """The model's answers for the validation images, in their order."""
    loader = load_data(config, 0, torch.device("cpu"), channels_last=True).val
    with torch.no_grad():
        return np.concatenate([model.eval()(images).argmax(1).numpy() for images, _ in loader])


def paired(ours: np.ndarray, theirs: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """The difference of two accuracies on the same images and its standard error, both in points.

    With d = right - right' of an image, -1, 0 or 1: mean(d) and std(d) / sqrt(n).
    """
    difference = (ours == truth).astype(float) - (theirs == truth).astype(float)
    return 100 * float(difference.mean()), 100 * float(difference.std() / np.sqrt(len(truth)))


def last_training_loss(folder: Path, steps: int) -> float:
    """The mean of the last epoch's curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / CURVES / "qat" / "train"), size_guidance={"scalars": 0})
    events.Reload()
    points = events.Scalars("loss")
    return float(np.mean([point.value for point in points if point.step > points[-1].step - steps]))


def result_of(folder: Path, what: str) -> dict[str, Any]:
    """One line of the results, from the folder of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    model, floating, config = opened(folder)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    arrays = np.load(str(config.data.root))
    truth, answers = arrays["y_val"], predictions(model, config.data)
    difference, error = paired(answers, predictions(floating, config.data), truth)
    onnx = summary.get("onnx", {})
    return {
        "row": config.name, "bits": config.quantization.weight.bits, "what": what,
        "own_float": config.float.epochs > 0, "seed": config.seed,
        "epochs": config.qat.epochs + sum(stage.epochs for stage in config.qat.progressive),
        "date": time.strftime("%Y-%m-%d"), "commit": commit,
        **{stage: summary.get(stage, {}).get("top1") for stage in STAGES},
        "agreement": onnx.get("agreement"), "differing_integers": onnx.get("layers", {}).get("differing"),
        **{name: summary[name] for name in ("seconds", "machine", "versions")},
        "difference": difference, "standard_error": error,
        "train_loss": last_training_loss(folder, len(arrays["y_train"]) // config.data.batch_size),
    }  # fmt: skip


def keep_model(folder: Path) -> None:
    """Copy the trained model of a run into benchmarks/models: the ONNX file, and the weights with their ranges."""
    model, _, config = opened(folder)
    state = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}
    files = [MODELS / f"{config.name}{suffix}" for suffix in (".safetensors", ".onnx")]
    save_file(state, files[0], metadata={"top1": str(model.accuracy)})
    shutil.copyfile(folder / "model.onnx", files[1])
    for file in files:
        if file.stat().st_size > LARGEST:
            raise SystemExit(f"{file}: {file.stat().st_size:,} bytes, more than {LARGEST:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--what", default="our recipe", help="its name in the table")
    parser.add_argument("--model", action="store_true", help="keep its model too")
    given = parser.parse_args()
    with ACCURACY.open("a") as file:
        file.write(json.dumps(result_of(given.run, given.what)) + "\n")
    if given.model:
        keep_model(given.run)


if __name__ == "__main__":
    main()
