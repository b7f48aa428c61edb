"""Segmenters and detectors of torchvision from the YAML to the proof: an epoch of each on canvases, and a step's cost.

OMP_NUM_THREADS=1 python -m benchmarks.tasks                  # all that benchmarks/results/tasks.jsonl lacks
python -m benchmarks.tasks ssd300_vgg16 fcos_resnet50_fpn     # these, again
python -m benchmarks.tasks --steps                            # only the cost of steps
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import qat
from benchmarks.kept import RESULTS, kept, table
from benchmarks.speed_rows import machine
from qat.training.config.file import load_config
from qat.training.config.schema import RunConfig
from qat.training.data.loaders import load_data
from qat.training.loop.engine import Training
from qat.training.loop.stage import StageRun
from qat.training.model import build_model, prepare_model
from qat.training.run.logging import RunLog
from qat.training.script import run

KEPT = RESULTS / "tasks.jsonl"
SIZES = {
    "lraspp_mobilenet_v3_large": 64, "deeplabv3_mobilenet_v3_large": 64, "deeplabv3_resnet50": 64,
    "deeplabv3_resnet101": 64, "fcn_resnet50": 64, "fcn_resnet101": 64, "ssdlite320_mobilenet_v3_large": 96,
    "ssd300_vgg16": 300, "retinanet_resnet50_fpn": 96, "retinanet_resnet50_fpn_v2": 96, "fcos_resnet50_fpn": 96,
    "fasterrcnn_mobilenet_v3_large_320_fpn": 96, "fasterrcnn_mobilenet_v3_large_fpn": 96,
    "fasterrcnn_resnet50_fpn": 96, "fasterrcnn_resnet50_fpn_v2": 96,
}  # fmt: skip
"""Side of the images of each builder; SSD300's last maps have no pixel left of smaller ones."""
STEPS = {
    "ssdlite320_mobilenet_v3_large": (320, 8),
    "deeplabv3_mobilenet_v3_large": (256, 4),
    "retinanet_resnet50_fpn_v2": (256, 2),
}
"""Size and batch of images at which steps are timed, near those that the builders are made for."""
ROUNDS = 5


def config_of(name: str, size: int, batch: int, *more: str) -> RunConfig:
    """Return a shipped config, changed to one short epoch of each stage."""
    shipped = "segmentation" if name.startswith(("lraspp", "deeplab", "fcn")) else "detection"
    small = "data.limit_train=96 data.limit_val=16 float.epochs=1 qat.epochs=1 float.warmup_epochs=0"
    file = [f"export.onnx={'rcnn' not in name}", "export.end_to_end=false"]
    sizes = [f"data.image_size={size}", f"data.batch_size={batch}"]
    changes = [f"model.name={name}", *sizes, *small.split(), *file, *more]
    return load_config(f"digits_{shipped}.yaml", changes, Path("configs"))


def measure(name: str) -> dict[str, Any]:
    """Train a builder for an epoch of each stage, export and prove it, and time its steps."""
    with tempfile.TemporaryDirectory(prefix="qat_tasks_") as folder:
        config = config_of(name, SIZES[name], 4, f"run_dir={folder}/run")
        began, status = time.monotonic(), run(config)
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return {
        "row": name, "task": config.task.name, "status": status, "image_size": SIZES[name], "machine": machine(),
        "versions": summary["versions"], "step": step_cost(name), "seconds": time.monotonic() - began,
        **{key: summary[key] for key in ("float", "calibrated", "qat", "onnx") if key in summary},
    }  # fmt: skip


def step_cost(name: str) -> float | None:
    """The median of QAT's steps as a share of the float model's, measured in turns; None for those not in STEPS."""
    if name not in STEPS:
        return None
    config, device = config_of(name, *STEPS[name]), torch.device("cpu")
    data = load_data(config.data, 0, device, config.channels_last, config.task.kind)
    model = build_model(config.model, len(data.classes))
    prepared = prepare_model(model, config, data.image_shape)
    qat.calibrate(prepared, data.calibration(2))
    batch, seconds = next(iter(data.train)), ([], [])
    with tempfile.TemporaryDirectory(prefix="qat_tasks_") as folder:
        trainings = []
        for stage, each in (("float", model), ("qat", prepared)):
            layout = torch.channels_last if config.channels_last else torch.preserve_format
            each.to(memory_format=layout).train()
            places = (device, RunLog(Path(folder)), Path(folder))
            trainings.append(
                Training(StageRun(stage, getattr(config, stage), config, each, data.train, data.val, *places))
            )
        for turn in range(ROUNDS + 2):
            for training, times in zip(trainings, seconds, strict=True):
                began = time.perf_counter()
                training.step([training.on_device(batch)])[0].tolist()
                if turn > 1:  # the first ones trace, compile and allocate
                    times.append(time.perf_counter() - began)
    return median(seconds[1]) / median(seconds[0])


def tasks_table() -> str:
    """A line for each builder: scores, the proof, the file, the cost of a step."""
    rows = []
    for each in kept(KEPT):
        metric, file = ("map" if each["task"] == "detection" else "miou"), each.get("onnx")
        integers = "{differing:,} of {elements:,}".format(**file["layers"]) if file else "in parts"
        scores = [f"{each[key][metric]:.1f}" if key in each else "" for key in ("float", "calibrated", "qat", "onnx")]
        shares = [f"{100 * file['agreement']:.2f} %", f"{file['size_bytes'] / 1e6:.1f} MB"] if file else ["", ""]
        name, step = f"`{each['row']}`", f"{each['step']:.2f}" if each["step"] else ""
        rows.append([name, str(each["image_size"]), *scores, shares[0], integers, shares[1], step])
    titles = "builder, pixels, float, calibrated, QAT, file, same answers, integers that differ, size, step / float"
    said = {f"{each['machine']['processor']}, torch {each['versions']['torch']}, one thread" for each in kept(KEPT)}
    at = ", ".join(f"{name} at {size} pixels in batches of {batch}" for name, (size, batch) in STEPS.items())
    return f"{table(titles.split(', '), rows, 1)}\n{'; '.join(sorted(said))}. Steps: {at}.\n"


def main() -> None:
    done = {each["row"]: each for each in kept(KEPT)}
    if sys.argv[1:] == ["--steps"]:
        done = {name: {**row, "step": step_cost(name)} for name, row in done.items()}
        KEPT.write_text("".join(json.dumps(done[key]) + "\n" for key in SIZES if key in done))
        return
    for name in sys.argv[1:] or [name for name in SIZES if name not in done]:
        done[name] = measure(name)
        KEPT.write_text("".join(json.dumps(done[key]) + "\n" for key in SIZES if key in done))
        print(name, done[name]["step"], flush=True)


if __name__ == "__main__":
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set OMP_NUM_THREADS=1: the table says one thread"
    main()
