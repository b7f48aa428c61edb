"""The metrics of a stage: sums over training images, a point every few steps, a line per epoch, and warnings."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qat.collectives import rank_count, summed
from qat.quantizer import Quantizer
from qat.quantizer.training import scales_at_minimum
from qat.training.config.stages import StageConfig
from qat.training.loop.evaluation import Evaluation
from qat.training.loop.stage import StageRun, rate_key

CORRECT = 1
"""The column of a step's row that is a sum over images; the others are means."""


@dataclass
class Meter:
    """Sums over training images on the host, and the results of recent steps that are still on the device."""

    loss: float = 0.0
    correct: float = 0.0
    images: int = 0
    seconds: float = 0.0
    grad_norm: float = 0.0
    added: list[str] = field(default_factory=list)
    """Names of what aids and rules add to the loss."""
    losses: list[float] = field(default_factory=list)
    """Their sums, as of the loss."""
    rows: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    @property
    def mean_loss(self) -> float:
        """Mean loss of the images so far."""
        return self.loss / self.images

    @property
    def top1(self) -> float:
        """Accuracy on the images so far, in percent, in training mode."""
        return 100.0 * self.correct / self.images

    @property
    def images_per_second(self) -> float:
        """Speed, including data loading."""
        return self.images / self.seconds

    def read(self) -> list[float]:
        """Wait for the device, add the rows (loss, correct, gradient norm, added ...) up, and return the losses.

        All ranks read at the same time, and have the same results: each has its share of the images.
        """
        if not self.rows:
            return []
        total = summed(torch.stack(self.rows))
        total[:, [column for column in range(total.shape[1]) if column != CORRECT]] /= rank_count()  # means
        rows = total.tolist()  # the one host-device synchronisation
        for (loss, correct, _, *added), size in zip(rows, self.sizes, strict=True):
            self.loss += loss * size
            self.correct += correct
            self.images += size
            before = self.losses or [0.0] * len(added)
            self.losses = [total + each * size for total, each in zip(before, added, strict=True)]
        self.grad_norm = rows[-1][2]
        now = time.perf_counter()
        self.seconds, self.since, self.rows, self.sizes = self.seconds + now - self.since, now, [], []
        return [row[0] for row in rows]

    def sums(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: `Meter(**sums)` goes on. It has been read."""
        return {key: value for key, value in vars(self).items() if key not in ("rows", "sizes", "since")}

    def merge(self, other: "Meter") -> None:
        """Add another meter's sums."""
        self.loss += other.loss
        self.correct += other.correct
        self.images += other.images
        self.seconds += other.seconds


def log_window(run: StageRun, step: int, window: Meter, lr: float) -> None:
    """Log the metrics of the last few steps."""
    curves = {
        "train_loss": window.mean_loss,
        "train_top1": window.top1,
        "lr": lr,
        "images_per_second": window.images_per_second,
        **{name: total / window.images for name, total in zip(window.added, window.losses, strict=True)},
    }
    if run.stage.clip_grad_norm is not None:
        curves["grad_norm"] = window.grad_norm
    for name, value in curves.items():
        run.log.scalar(f"{run.name}/{name}", value, step)


def log_epoch(run: StageRun, epoch: int, training: Meter, validation: Evaluation, note: str = "") -> None:
    """Log the validation metrics and the quantizers, and print one line about the epoch, with the note at its end."""
    step = run.step(epoch + 1)
    run.log.scalar(f"{run.name}/val_loss", validation.loss, step)
    run.log.scalar(f"{run.name}/val_top1", validation.top1, step)
    _log_quantizers(run, step)
    parts = [
        f"{run.name} {epoch + 1}/{run.stage.epochs}: train loss {training.mean_loss:.3f}, top1 {training.top1:.2f} %",
        f"val loss {validation.loss:.3f}, top1 {validation.top1:.2f} %",
        f"{training.images_per_second:.0f} images/s",
        note,
        _floor_note(run),
    ]
    run.log.say("; ".join(part for part in parts if part))


def _floor_note(run: StageRun) -> str:
    """How many learned scales rest on their floor; "" if none does."""
    counts = scales_at_minimum(run.model)
    resting, total = (sum(each) for each in zip(*counts.values(), strict=True)) if counts else (0, 0)
    if not resting:
        return ""
    worst = max(counts, key=lambda name: counts[name][0])
    return (
        f"{resting:,} of {total:,} learned scales rest on their floor ({worst} has most): a lower"
        f" {rate_key(run.config, run.name)} or qat.quantizer_lr_factor may help"
    )


def _log_quantizers(run: StageRun, step: int) -> None:
    """Log what the quantizers learn."""
    quantizers = {name: module for name, module in run.model.named_modules() if isinstance(module, Quantizer)}
    curves = {
        f"{kind}/{name}": values for name, module in quantizers.items() for kind, values in module.curves().items()
    }
    curves |= {
        f"ewgs_delta/{name}": module.ewgs_delta for name, module in quantizers.items() if module.spec.ewgs == "hessian"
    }
    if not curves:
        return
    means = torch.stack([values.detach().float().mean() for values in curves.values()]).tolist()
    for name, mean in zip(curves, means, strict=True):
        run.log.scalar(name, mean, step)


SIGMAS = 2.0
"""Differences count from this many standard deviations on, given the size of the validation split."""

START_LEFT = 0.5
"""From this share of the start on, which is decay ** steps, averaged weights are those of no training."""


def too_slow(run: StageRun) -> list[str]:
    """That averaged weights are still those of the start, if they are."""
    decay, steps = run.stage.ema_decay, run.stage.epochs * run.steps_per_epoch
    if decay is None or steps == 0 or decay**steps <= START_LEFT:
        return []
    return [
        f"ema_decay: {decay:g} is slow for the {steps} steps of this stage: its averages are {100 * decay**steps:.0f} %"
        f" what the stage starts from; try {1 - 10 / max(steps, 20):.2g}"
    ]


def warnings_about(name: str, key: str, stage: StageConfig, evaluation: Evaluation, start: float | None) -> list[str]:
    """A warning if a stage's result is at chance level, or worse than `start`, the top1 before it.

    Chance level is the share of the most common label, which a constant prediction reaches, and two deviations.
    """
    advice = f"; try a lower {key} (now {stage.lr:g}) or more epochs" if stage.epochs else ""
    found = f"{name}: val top1 {evaluation.top1:.2f} %"
    chance = evaluation.most_common + _deviation(evaluation.most_common, evaluation.count)
    if evaluation.most_common == 100 or evaluation.top1 <= chance < 100:  # else there are too few images to tell
        return [
            f"{found} is at chance level: the same answer for all {evaluation.count} images gives"
            f" {evaluation.most_common:.2f} %{advice}"
        ]
    if start is not None:
        both = (start + evaluation.top1) / 2
        if evaluation.top1 < start - math.sqrt(2) * _deviation(both, evaluation.count):
            return [f"{found} is below the {start:.2f} % that it started from{advice}"]
    return []


def _deviation(percent: float, count: int) -> float:
    """Of a share of so many images, in percent: two standard deviations."""
    share = percent / 100
    return 100 * SIGMAS * math.sqrt(share * (1 - share) / count)
