"""`--dry-run`: layers, cost and estimated time of a run, without writing files."""

import itertools
import tempfile
from pathlib import Path
from timeit import timeit

import torch
from torch import nn

import qat
from qat.collectives import rank_count
from qat.text import table
from qat.training.config.schema import RunConfig
from qat.training.data.loaders import Data
from qat.training.errors import UserError, value_errors_reported
from qat.training.loop.aids import build_distillation
from qat.training.loop.engine import Training
from qat.training.loop.evaluation import evaluate
from qat.training.loop.stage import StageRun, float_counterpart
from qat.training.run.checkpoint import save_float_weights
from qat.training.run.folder import FLOAT_WEIGHTS
from qat.training.run.logging import RunLog

STEPS = 3  # timed steps of a stage, after one that warms up


def dry_run(config: RunConfig, data: Data, device: torch.device, model: nn.Module, prepared: nn.Module) -> None:
    """Print the layers, their cost, and the time of a run, from a few real steps."""
    if rank_count() > 1:
        raise UserError("--dry-run: is for one process; start it without torchrun")
    if len(data.train) == 0:
        raise UserError(f"data.batch_size: {config.data.batch_size} leaves no whole training batch; reduce it")
    print(qat.summary(prepared), end="\n\n")
    rows = qat.cost(prepared, torch.zeros(1, *data.image_shape))
    head = ["layer", "MACs", "weight bits", "input bits", "weight bytes", "BOPs"]
    cells = [[row.name, *(f"{value:,}" for value in (*row[1:], row.bops))] for row in rows]
    print(*table([head, *cells], numbers=True), sep="\n")
    macs, bops, size = (sum(getattr(row, key) for row in rows) for key in ("macs", "bops", "weight_bytes"))
    print(f"\none image: {macs / 1e9:.3f} G MACs; {bops / 1e9:,.1f} G bit operations (MACs * bits * bits)")
    whole = sum(each.numel() * each.element_size() for each in model.parameters())
    print(f"weights: {size / 1e6:.2f} MB at their bits; the float model has {whole / 1e6:.2f} MB", flush=True)
    with value_errors_reported():
        qat.calibrate(prepared.to(device), data.calibration(1))
    epochs = float_counterpart(config.qat).epochs  # of all stages on grids
    float_epochs = config.float.epochs + epochs * config.float_finetune
    seconds, layout = 0.0, torch.channels_last if config.channels_last else torch.preserve_format
    with tempfile.TemporaryDirectory(prefix="qat_dry_run_") as name:
        folder = Path(name)
        save_float_weights(folder / FLOAT_WEIGHTS, model)  # the run's own model may be the teacher
        stages = (("float", model, config.float, float_epochs), ("qat", prepared, config.qat, epochs))
        for stage, each, settings, count in stages:
            if count:
                teacher = build_distillation(config, settings, len(data.classes), folder / FLOAT_WEIGHTS, device)
                run = StageRun(
                    stage, settings, config, each.to(device).to(memory_format=layout), data.train, data.val, device,
                    RunLog(folder), folder, distillation=teacher,
                )  # fmt: skip
                one = _seconds_of_epoch(run)
                seconds += count * one
                print(f"{stage}: {count} epochs of about {one:.3g} s, by {STEPS} steps on {device}", flush=True)
    print(f"about {seconds / 60:.1f} min in all; calibration, export and proof besides")


def _seconds_of_epoch(run: StageRun) -> float:
    training, val = Training(run), [next(iter(run.val))]
    training.aids.student.train()
    batches = itertools.chain.from_iterable(itertools.repeat(run.train))  # over as many epochs as it takes

    def step() -> None:
        training.aids.before_step(0.0)
        group = [training.on_device(next(batches)) for _ in range(run.stage.accumulate)]
        training.step(group)[0].tolist()  # waits for the device

    def validate() -> None:
        evaluate(run.model, val, run.device, channels_last=run.config.channels_last)

    step()  # compiles and allocates
    steps = timeit(step, number=STEPS) / STEPS * run.steps_per_epoch
    training.aids.before_evaluation()
    validate()
    return steps + timeit(validate, number=1) * len(run.val)
