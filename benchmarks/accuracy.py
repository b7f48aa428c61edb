"""What fine-tuning makes of few bits: the recipes of configs/ from their float weights, on CIFAR-10.

    python -m benchmarks.accuracy --data CIFAR10.npz --weights RESNET20.safetensors --runs FOLDER [--rows ROW ...]
    python -m benchmarks.accuracy --keep resnet20_cifar10_w4a4 --runs FOLDER    # its model into benchmarks/models
    python -m benchmarks.document                                               # docs/measurements.md from what is kept

Each row is one process, which goes on from its run folder if it was interrupted. Results go to
benchmarks/results/accuracy.jsonl, one line a row and seed, with what was run; what is there already is not run again.
The file also has rows of other settings: `python train.py --config CONFIG OVERRIDES` as their lines say runs them.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qat
from benchmarks.kept import RESULTS, kept
from qat.training.config.file import load_config
from qat.training.config.schema import DataConfig
from qat.training.data.loaders import load_data
from qat.training.model.building import build_model
from qat.training.run.logging import CURVES

ROOT = Path(__file__).resolve().parents[1]
ACCURACY = RESULTS / "accuracy.jsonl"
MODELS = ROOT / "benchmarks" / "models"
LARGEST = 2_000_000
"""Bytes of a kept file."""
HELD_OUT = 5000
"""Training images that rows which choose between recipes are validated on."""


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        config: stem of a file of configs/.
        bits: of weights and activations.
        epochs: of QAT in all.
        what: its name in the table.
        overrides: changes of the config.
        own_float: whether its float weights are trained first, once for all seeds; false: `--weights`.
        held_out: whether it is validated on training images that are held out, since recipes were chosen with it.
    """

    config: str
    bits: int
    epochs: int
    what: str
    overrides: tuple[str, ...] = ()
    own_float: bool = False
    held_out: bool = False


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for bits in (8, 4, 3, 2):
        name = f"resnet20_cifar10_w{bits}a{bits}"
        rows[name] = Row(name, bits, 6, "our recipe", ("float_finetune=true",) if bits in (8, 4) else ())
        if bits < 8:
            rows[f"{name}_long"] = Row(name, bits, 30, "our recipe, long", ("qat.epochs=30",))
    binary, mobilenet, vit = "resnet20_cifar10_w1a1", "mobilenet_v2_cifar10_w4a4", "vit_cifar10_w4a4"
    rows[binary] = Row(binary, 1, 30, "our recipe, first and last layer in float")
    rows[mobilenet] = Row(mobilenet, 4, 3, "MobileNetV2, our recipe", own_float=True, held_out=True)
    rows[vit] = Row(vit, 4, 3, "vision transformer, our recipe", own_float=True)
    return rows


ROWS = _rows()
"""Name of the run folder and of the result -> the row."""


def command(name: str, row: Row, seed: int, given: argparse.Namespace) -> list[str]:
    """The process of a row."""
    start = ["float.epochs=0", f"model.checkpoint={float_run(row, given) / 'float.safetensors'}"]
    files = [f"data.root={_data(row, given)}", *(start if row.own_float else [f"model.checkpoint={given.weights}"])]
    where = [f"run_dir={given.runs / f'{name}-{seed}'}", "resume=auto", f"seed={seed}"]
    return [sys.executable, "train.py", "--config", f"configs/{row.config}.yaml", *where, *files, *row.overrides]


def _data(row: Row, given: argparse.Namespace) -> Path:
    return held_out(given.data, given.runs) if row.held_out else given.data


def held_out(data: Path, runs: Path) -> Path:
    """A file of the training images alone, the last 5,000 of them for validation; made once."""
    path = runs / "held_out.npz"
    if not path.exists():
        arrays = np.load(data)
        images, labels, first = arrays["x_train"], arrays["y_train"], len(arrays["y_train"]) - HELD_OUT
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(
            part, x_train=images[:first], y_train=labels[:first], x_val=images[first:], y_val=labels[first:],
            classes=arrays["classes"],
        )  # fmt: skip
        part.replace(path)
    return path


def float_run(row: Row, given: argparse.Namespace) -> Path:
    """The folder of the float training that the rows of a config share."""
    return Path(given.runs) / f"{row.config}-float"


def train_float(row: Row, given: argparse.Namespace) -> None:
    """Train the float model of a config, or go on with it; what is finished says so and ends at once."""
    where = [f"run_dir={float_run(row, given)}", "resume=auto", f"data.root={_data(row, given)}"]
    started = ["train.py", "--config", f"configs/{row.config}.yaml", *where, "qat.epochs=0", "export.onnx=false"]
    subprocess.run([sys.executable, *started], cwd=ROOT, check=True)


def float_model(row: Row) -> nn.Module:
    """The float model of a row, without weights."""
    config = load_config(str(ROOT / "configs" / f"{row.config}.yaml"))
    return build_model(config.model, 10, with_weights=False)


def predictions(model: nn.Module, config: DataConfig) -> np.ndarray:
    """The model's answers for the validation images, in their order."""
    loader = load_data(config, 0, torch.device("cpu"), channels_last=True).val
    with torch.no_grad():
        return np.concatenate([model.eval()(images).argmax(1).numpy() for images, _ in loader])


def paired(ours: np.ndarray, theirs: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """The difference of two accuracies on the same images and its standard error, both in points.

    With d = right - right' of an image, -1, 0 or 1: mean(d) and std(d) / sqrt(n).

    >>> paired(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0]), np.array([1, 1, 1, 0]))
    (25.0, 21.650635094610966)
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


def result_of(name: str, row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """One line of the results, from the folder of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    found: dict[str, Any] = {"row": name, **asdict(row), "seed": seed}
    found |= {"date": time.strftime("%Y-%m-%d"), "commit": _commit()}
    for stage in ("float", "float_finetune", "calibrated", "qat", "onnx"):
        found[stage] = summary.get(stage, {}).get("top1")
    found["agreement"] = summary.get("onnx", {}).get("agreement")
    found["differing_integers"] = summary.get("onnx", {}).get("layers", {}).get("differing")
    found |= {"seconds": summary["seconds"], "machine": summary["machine"], "versions": summary["versions"]}
    floating = float_model(row)
    model = qat.load(folder, floating)
    config: DataConfig = model.config.data  # type: ignore[union-attr, assignment]
    floating.load_state_dict(load_file(folder / "float.safetensors"))
    truth, answers = np.load(str(config.root))["y_val"], predictions(model, config)
    found["difference"], found["standard_error"] = paired(answers, predictions(floating, config), truth)
    found["right"] = base64.b64encode(np.packbits(answers == truth).tobytes()).decode()
    images = len(np.load(str(config.root))["y_train"])
    return found | {"train_loss": last_training_loss(folder, images // config.batch_size)}


def run(name: str, seed: int, given: argparse.Namespace) -> None:
    """Run a row, or go on with it, and append its result."""
    row = ROWS[name]
    if row.own_float:
        train_float(row, given)
    started = command(name, row, seed, given)
    print(" ".join(started), flush=True)
    status = subprocess.run(started, cwd=ROOT, check=False).returncode
    if status != 0:
        raise SystemExit(f"{name}: the run ended with status {status}; run the command again to go on")
    found = result_of(name, row, seed, given.runs / f"{name}-{seed}")
    with ACCURACY.open("a") as file:
        file.write(json.dumps(found) + "\n")


def keep(name: str, seed: int, runs: Path) -> None:
    """Copy the trained model of a row into benchmarks/models: the ONNX file, and the weights with their ranges."""
    folder = runs / f"{name}-{seed}"
    MODELS.mkdir(exist_ok=True)
    model = qat.load(folder, float_model(ROWS[name]))
    state = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}
    save_file(state, MODELS / f"{name}.safetensors", metadata={"top1": str(model.accuracy)})
    shutil.copyfile(folder / "model.onnx", MODELS / f"{name}.onnx")
    for suffix in (".onnx", ".safetensors"):
        size = (MODELS / f"{name}{suffix}").stat().st_size
        if size > LARGEST:
            raise SystemExit(f"benchmarks/models/{name}{suffix}: {size:,} bytes, more than {LARGEST:,}")


def _commit() -> str:
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="NAME", help=" ".join(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--keep", choices=ROWS, metavar="NAME")
    given = parser.parse_args()
    if given.keep:
        keep(given.keep, given.seeds[0], given.runs)
        return
    os.makedirs(given.runs, exist_ok=True)
    done = {(each["row"], each["seed"]) for each in kept(ACCURACY)}
    for seed in given.seeds:
        for name in given.rows:
            if (name, seed) not in done:
                run(name, seed, given)


if __name__ == "__main__":
    main()
