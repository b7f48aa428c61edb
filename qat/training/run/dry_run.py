"""`--dry-run`: the layers that a run would train, what they cost, and about how long it takes; nothing is written."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import qat
from qat.collectives import rank_count
from qat.finetuning import grouped
from qat.text import table
from qat.training.config.schema import RunConfig
from qat.training.data.loaders import Data
from qat.training.errors import UserError, value_errors_reported
from qat.training.loop.aids import build_distillation, build_mixing
from qat.training.loop.engine import Training
from qat.training.loop.evaluation import evaluate
from qat.training.loop.preparation import prepare_model
from qat.training.loop.stage import StageRun, float_counterpart, progressive_stages
from qat.training.run.checkpoint import save_float_weights
from qat.training.run.folder import FLOAT_WEIGHTS
from qat.training.run.logging import RunLog

STEPS = 3
"""Steps of a stage that are timed, behind one that is not."""


def dry_run(config: RunConfig, data: Data, device: torch.device, model: nn.Module) -> None:
    """Print the table of layers, their cost, and the time of a run as some real training steps of each kind have it."""
    if rank_count() > 1:
        raise UserError("--dry-run: is for one process; start it without torchrun")
    if len(data.train) == 0:
        raise UserError(f"data.batch_size: {config.data.batch_size} leaves no whole training batch; reduce it")
    prepared = prepare_model(model, config, data.image_shape)
    print("\n".join([qat.summary(prepared), "", *_cost_lines(model, prepared, data), ""]), flush=True)
    print("\n".join(_time_lines(config, data, device, model, prepared)))


def _cost_lines(model: nn.Module, prepared: nn.Module, data: Data) -> list[str]:
    rows = qat.cost(prepared, torch.zeros(1, *data.image_shape))
    macs, bops, size = (sum(getattr(row, key) for row in rows) for key in ("macs", "bops", "weight_bytes"))
    cells = [
        [row.name, f"{row.macs / 1e6:,.3f}", f"{row.weight_bits}", f"{row.activation_bits}", f"{row.bops / 1e6:,.1f}",
         f"{row.weight_bytes / 1e3:,.1f}"]
        for row in rows
    ]  # fmt: skip
    head = ["layer", "million MACs", "weight bits", "input bits", "million BOPs", "weight kB"]
    float_size = sum(each.numel() * each.element_size() for each in model.parameters())
    return [
        *table([head, *cells], numbers=True), "",
        f"one image: {macs / 1e9:.3f} G MACs, {bops / 1e9:,.3f} G BOPs, in float {macs * 1024 / 1e9:,.3f} G;"
        " BOPs = MACs * weight bits * input bits (arXiv:2005.07093), 32 in float",
        f"parameters: {float_size / 1e6:.2f} MB in float; {size / 1e6:.2f} MB with weights at their bits, and biases",
    ]  # fmt: skip


def _time_lines(
    config: RunConfig, data: Data, device: torch.device, model: nn.Module, prepared: nn.Module
) -> list[str]:
    """The time of each stage, and of all; earlier stages on grids are taken to be as fast as the last one."""
    with value_errors_reported():
        qat.calibrate(prepared.to(device), data.calibration(1))
    earlier, counterpart = progressive_stages(config.qat), float_counterpart(config.qat)
    epochs = config.qat.epochs + sum(stage.epochs for stage in earlier.values())
    rows, total, classes = [], 0.0, len(data.classes)
    with tempfile.TemporaryDirectory(prefix="qat_dry_run_") as folder:
        weights = Path(folder) / FLOAT_WEIGHTS
        save_float_weights(weights, model)  # a teacher's, if they are the run's own
        for name, each, stage, count in (
            ("float", model, config.float, config.float.epochs),
            ("float_finetune", model, counterpart, counterpart.epochs * config.float_finetune),
            (" + ".join([*earlier, "qat"]), prepared, config.qat, epochs),
        ):
            if count:
                layout = torch.channels_last if config.channels_last else torch.preserve_format
                run = StageRun(
                    name, stage, config, each.to(device).to(memory_format=layout), data.train, data.val, device,
                    RunLog(Path(folder)), Path(folder), mixing=build_mixing(stage, classes),
                    distillation=build_distillation(config, stage, classes, weights, device),
                )  # fmt: skip
                step, validation = _seconds(run)
                seconds = count * (run.steps_per_epoch * step + validation)
                total += seconds
                rows.append([name, str(count), str(run.steps_per_epoch), *map(_time, (step, validation, seconds))])
    head = ["stage", "epochs", "steps", "a step", "validation", "in all"]
    said = f"about {_time(total)} on {device}, by {STEPS} steps of each stage; calibration, export and proof besides"
    return [*table([head, *rows], numbers=True), "", said]


def _seconds(run: StageRun) -> tuple[float, float]:
    """Seconds of a training step, its batches included, and of a pass over the validation split."""
    training = Training(run)
    training.aids.student.train()
    run.model.train()
    times = []
    groups = _groups(run)
    for _ in range(1 + STEPS):
        started = time.perf_counter()
        group = [training.on_device(batch) for batch in next(groups)]
        if run.mixing is not None:
            group = [run.mixing(images, labels) for images, labels in group]
        training.aids.before_step(0.0)
        training.step(group)[0].tolist()  # waits for the device
        times.append(time.perf_counter() - started)
    training.aids.before_evaluation()
    batch = [next(iter(run.val))]
    for _ in range(2):
        started = time.perf_counter()
        evaluate(run.model, batch, run.device, channels_last=run.config.channels_last)
    return median(times[1:]), (time.perf_counter() - started) * len(run.val)


def _groups(run: StageRun) -> Iterator[list[Any]]:
    """The batches of one step after another, over as many epochs as it takes."""
    for epoch in itertools.count():
        run.train.set_epoch(epoch)
        yield from grouped(run.train, run.stage.accumulate)


def _time(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes / 60:.1f} h" if minutes >= 120 else f"{minutes:.1f} min" if minutes >= 2 else f"{seconds:.3g} s"
