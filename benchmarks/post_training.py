"""What post-training steps make of few bits without training: ResNet-20 from its published float weights, MobileNetV2.

    python -m benchmarks.post_training --data CIFAR10.npz --weights RESNET20.safetensors [--rows NAME ...] [--seeds 0 1]
    python -m benchmarks.post_training ... --mobilenet RUNS/mobilenet_v2_cifar10_w4a4-float/float.safetensors
    python -m benchmarks.document         # docs/worth_it.md's tables from what is kept

The grids are those of the config but for the bits, and the images its 8 calibration batches, 1,024 training images
without labels. MobileNetV2's float weights are those that `python -m benchmarks.accuracy` trains. Results go to
benchmarks/results/post_training.jsonl, one line a row and seed; the seed draws the images and what a step draws. What
is there already is not run again.
"""

import argparse
import base64
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import qat
from benchmarks.accuracy import ROOT, paired, predictions
from benchmarks.accuracy_table import gained
from qat.calibration import Step
from qat.post_training import BRECQ, AdaRound, CrossLayerEqualization, QDrop
from qat.training.config.file import load_config
from qat.training.data.loaders import load_data
from qat.training.loop.preparation import prepare_model
from qat.training.model.building import build_model
from qat.training.model.weights import load_float_weights

RESULTS = Path(__file__).resolve().parent / "results" / "post_training.jsonl"

RESNET, MOBILENET = "resnet20_cifar10_w4a4", "mobilenet_v2_cifar10_w4a4"
GRIDS = {
    "W4A8": (RESNET, 4, 8), "W4A4": (RESNET, 4, 4), "W3A3": (RESNET, 3, 3), "W2A2": (RESNET, 2, 2),
    "MobileNetV2 W4A8": (MOBILENET, 4, 8), "MobileNetV2 W4A4": (MOBILENET, 4, 4),
}  # fmt: skip
"""The config, and bits of weights and activations."""


def steps_of(seed: int) -> dict[str, list[Step]]:
    """The steps of each row."""
    return {
        "calibration alone": [],
        "cross-layer equalization": [CrossLayerEqualization()],
        "AdaRound": [AdaRound(seed=seed)],
        "BRECQ": [BRECQ(seed=seed)],
        "QDrop": [QDrop(seed=seed)],
    }


ROWS = {f"{grid}: {what}": (grid, what) for grid in GRIDS for what in steps_of(0)}


def kept() -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run(name: str, seed: int, data: Path, weights: Path) -> dict[str, Any]:
    """One line of the results."""
    grid, what = ROWS[name]
    file, weight, activation = GRIDS[grid]
    bits = [f"quantization.weight.bits={weight}", f"quantization.activation.bits={activation}"]
    config = load_config(str(ROOT / "configs" / f"{file}.yaml"), [*bits, f"data.root={data}"])
    found = load_data(config.data, seed, torch.device("cpu"), channels_last=False)
    float_model = build_model(config.model, 10, with_weights=False)
    load_float_weights(float_model, weights, config.model.name)
    model = prepare_model(float_model.eval(), config, found.image_shape)
    began = time.perf_counter()
    qat.calibrate(model, found.calibration(config.quantization.calibration_batches), steps=steps_of(seed)[what])
    seconds = time.perf_counter() - began
    truth = np.load(data)["y_val"]
    ours, theirs = (predictions(each, config.data) for each in (model, float_model))
    difference, error = paired(ours, theirs, truth)
    return {
        "row": name, "seed": seed, "date": time.strftime("%Y-%m-%d"), "float": 100 * float((theirs == truth).mean()),
        "top1": 100 * float((ours == truth).mean()), "difference": difference, "standard_error": error,
        "seconds": seconds, **_in_onnxruntime(model.eval(), found),
        "right": base64.b64encode(np.packbits(ours == truth).tobytes()).decode(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": _processor(), "threads": torch.get_num_threads()},
    }  # fmt: skip


def _in_onnxruntime(model: nn.Module, data: Any) -> dict[str, float]:
    """Accuracy of the exported integers in ONNX Runtime, and the share of answers that are the model's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        qat.export_onnx(model, path, torch.zeros(1, *data.image_shape))
        found = qat.verify_onnx(path, model, data.val)
    return {"onnx": float(found.onnx_top1), "agreement": float(found.agreement)}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return name + (
        " with VNNI" if any("vnni" in line for line in lines if line.startswith("flags")) else " without VNNI"
    )


def post_training_table() -> str:
    """Every row, also those that were not run; what the steps give beside calibration alone, on the same images."""
    lines = [
        "| bits | steps | seeds | top-1 | against calibration alone | against float | ONNX | same answers | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    results = kept()
    machines = list(dict.fromkeys(_machine(each) for each in results))
    for name, (grid, what) in ROWS.items():
        own, plain = ([each for each in results if each["row"] == row] for row in (name, f"{grid}: calibration alone"))
        where = ", ".join(sorted({"abcdef"[machines.index(_machine(each))] for each in own}))
        lines.append(f"| {grid} | {what} | {' | '.join(_cells(own, plain))}{f' ({where})' if own else ''} |")
    if results:
        floats = {GRIDS[ROWS[each["row"]][0]][0]: each["float"] for each in results}
        said = ", ".join(f"{value:.1f} % ({file.rpartition('_cifar10')[0]})" for file, value in floats.items())
        lines += ["", f"Float: {said}.", *(f"({key}) {each}." for key, each in zip("abcdef", machines, strict=False))]
    return "\n".join(lines) + "\n"


def _machine(result: dict[str, Any]) -> str:
    """Where a row was measured, beside whose seconds it stands."""
    machine = result["machine"]
    return f"{machine['processor']}, {machine['threads']} thread, torch {result['versions']['torch']}"


def worth_table() -> str:
    """For each width: calibration alone, the best post-training step, and QAT, with what each costs."""
    lines = [
        "| bits | calibration alone | best post-training step | QAT, 2 epochs, plain | QAT, 6 epochs, our recipe |",
        "|---|---:|---:|---:|---:|",
    ]
    for bits, grid in ((4, "W4A4"), (3, "W3A3"), (2, "W2A2")):
        means = _means(grid)
        best = max(means, key=lambda what: means[what][0])
        step = f"{means[best][0]:.1f} %, {best}, {means[best][1]:.0f} s"
        name = f"resnet20_cifar10_w{bits}a{bits}"
        cells = [f"{means['calibration alone'][0]:.1f} %", step, _trained(f"{name}_short"), _trained(name)]
        lines.append(f"| {grid} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _trained(name: str) -> str:
    """What a row of benchmarks.accuracy ends with, and the minutes of its longest run: the others were resumed."""
    from benchmarks.accuracy import kept as trained

    rows = [each for each in trained() if each["row"] == name]
    if not rows:
        return "not run"
    seconds = np.median([each["seconds"] for each in rows])  # resumed runs count too little, disturbed ones too much
    return f"{np.mean([each['qat'] for each in rows]):.1f} %, {seconds / 60:.0f} min"


def _means(grid: str) -> dict[str, tuple[float, float]]:
    """Accuracy and seconds of each step at these bits, over the seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in kept():
        if each["row"].startswith(f"{grid}: "):
            found.setdefault(each["row"].partition(": ")[2], []).append(each)
    return {
        what: (float(np.mean([each["top1"] for each in own])), float(np.mean([each["seconds"] for each in own])))
        for what, own in found.items()
    }


def _cells(own: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[str]:
    if not own:
        return ["not run", *[""] * 6]
    mean = {
        key: float(np.mean([each[key] for each in own])) for key in ("top1", "difference", "standard_error", "onnx")
    }
    gain, error, shared = gained(own, plain) if own is not plain and plain else (0.0, 0.0, 0)
    agreement, seconds = (np.mean([each[key] for each in own]) for key in ("agreement", "seconds"))
    return [
        str(len(own)), f"{mean['top1']:.1f} %", f"{gain:+.1f} ± {error:.1f}" if shared and gain else "",
        f"{mean['difference']:+.1f} ± {mean['standard_error']:.1f}", f"{mean['onnx']:.1f} %",
        f"{100 * agreement:.1f} %", f"{seconds:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="ResNet-20's")
    parser.add_argument("--mobilenet", type=Path, help="MobileNetV2's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    given = parser.parse_args()
    weights = {RESNET: given.weights, MOBILENET: given.mobilenet}
    done = {(each["row"], each["seed"]) for each in kept()}
    for seed in given.seeds:
        for name in given.rows:
            file = weights[GRIDS[ROWS[name][0]][0]]
            if file is not None and (name, seed) not in done:
                found = run(name, seed, given.data, file)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print({key: found[key] for key in ("row", "seed", "top1", "onnx", "agreement", "seconds")}, flush=True)


if __name__ == "__main__":
    main()
