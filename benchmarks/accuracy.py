"""What fine-tuning makes of few bits: recipes, plain LSQ and torch.ao from the same float weights, data and epochs.

    python -m benchmarks.accuracy --data CIFAR10.npz --weights RESNET20.safetensors --runs FOLDER [--rows ROW ...]
    python -m benchmarks.accuracy --keep resnet20_cifar10_w4a4 --runs FOLDER    # its model into benchmarks/models
    python -m benchmarks.document                                               # docs/measurements.md from what is kept

Each row is one process, which goes on from its run folder if it was interrupted. Results go to
benchmarks/results/accuracy.jsonl, one line a row and seed; what is there already is not run again.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qat
from benchmarks.accuracy_rows import ROWS, TORCH_AO, Row
from qat.training.config.file import load_config
from qat.training.config.schema import DataConfig
from qat.training.data.loaders import load_data
from qat.training.model.building import build_model
from qat.training.run.logging import CURVES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.jsonl"
MODELS = ROOT / "benchmarks" / "models"
LARGEST = 2_000_000
"""Bytes of a kept file."""
HELD_OUT = 5000
"""Training images that rows which choose between recipes are validated on."""


def kept() -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def command(name: str, row: Row, seed: int, given: argparse.Namespace) -> list[str]:
    """The process of a row."""
    folder = given.runs / f"{name}-{seed}"
    if row.config == TORCH_AO:
        plain = ["-m", "benchmarks.accuracy_torch_ao", *row.overrides, "--data", str(given.data)]
        return [sys.executable, *plain, "--weights", str(given.weights), "--run", str(folder), "--seed", str(seed)]
    start = ["float.epochs=0", f"model.checkpoint={float_run(row, given) / 'float.safetensors'}"]
    files = [f"data.root={_data(row, given)}", *(start if row.own_float else [f"model.checkpoint={given.weights}"])]
    if row.teacher:
        files.append(f"qat.distillation.teacher.checkpoint={given.teacher}")
    where = [f"run_dir={folder}", "resume=auto", f"seed={seed}"]
    config = calibrated_run(row, given) / "bits.yaml" if row.size else f"configs/{row.config}.yaml"
    return [sys.executable, "train.py", "--config", str(config), *where, *files, *row.overrides]


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


def calibrated_run(row: Row, given: argparse.Namespace) -> Path:
    """The folder of a row's calibrated run, in which bits are chosen."""
    return Path(given.runs) / f"{row.config}-calibrated"


def choose_bits(row: Row, given: argparse.Namespace) -> None:
    """Choose the bits of each layer at the size of the row; once for all seeds."""
    folder, config = calibrated_run(row, given), f"configs/{row.config}.yaml"
    if (folder / "bits.yaml").exists():
        return
    where = [f"run_dir={folder}", "resume=auto", f"data.root={given.data}", f"model.checkpoint={given.weights}"]
    started = ["train.py", "--config", config, *where, "qat.epochs=0", "export.onnx=false"]
    subprocess.run([sys.executable, *started], cwd=ROOT, check=True)
    name = load_config(str(ROOT / config)).model.name
    chosen = ["-m", "qat", "bits", str(folder), "--size", str(row.size), "--model", name]
    subprocess.run([sys.executable, *chosen], cwd=ROOT, check=True)


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
    found = {"row": name, "seed": seed, "epochs": row.epochs, "date": time.strftime("%Y-%m-%d"), "commit": _commit()}
    for stage in ("float", "float_finetune", "calibrated", "qat", "onnx"):
        found[stage] = summary.get(stage, {}).get("top1")
    found["agreement"] = summary.get("onnx", {}).get("agreement")
    found["differing_integers"] = summary.get("onnx", {}).get("layers", {}).get("differing")
    found |= {"seconds": summary["seconds"], "machine": summary["machine"], "versions": summary["versions"]}
    if row.config == TORCH_AO:
        return found | {key: summary[key] for key in ("train_loss", "difference", "standard_error")}
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
    if row.size:
        choose_bits(row, given)
    started = command(name, row, seed, given)
    print(" ".join(started), flush=True)
    status = subprocess.run(started, cwd=ROOT, check=False).returncode
    if status != 0:
        raise SystemExit(f"{name}: the run ended with status {status}; run the command again to go on")
    found = result_of(name, row, seed, given.runs / f"{name}-{seed}")
    with RESULTS.open("a") as file:
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
    parser.add_argument("--teacher", type=Path, help="weights of ResNet-56, for rows that learn from it")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="NAME", help=" ".join(ROWS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--keep", choices=list(ROWS), metavar="NAME", help=" ".join(ROWS))
    given = parser.parse_args()
    if given.keep:
        keep(given.keep, given.seeds[0], given.runs)
        return
    os.makedirs(given.runs, exist_ok=True)
    done = {(each["row"], each["seed"]) for each in kept()}
    for seed in given.seeds:
        for name in given.rows:
            if (name, seed) not in done:
                run(name, seed, given)


if __name__ == "__main__":
    main()
