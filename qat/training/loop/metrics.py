"""The metrics of a stage: sums over training images, a point every few steps, a line per epoch, and warnings."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qat.collectives import rank_count, summed
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
    waited: float = 0.0  # seconds of them in which the next batch was not there yet
    grad_norm: float = 0.0
    added: list[str] = field(default_factory=list)  # names of what aids and rules add to the loss
    losses: list[float] = field(default_factory=list)  # their sums, as of the loss
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

    def read(self, curves: Mapping[str, Tensor] | None = None) -> tuple[list[float], dict[str, float]]:
        """Wait for the device, and add the rows (loss, correct, gradient norm, added ...) up.

        All ranks read at the same time, and have the same results: each has its share of the images.

        Returns:
            The losses, and the values of curves, which are of this rank alone.
        """
        if not self.rows:
            return [], {}
        total = summed(torch.stack(self.rows))
        total[:, [column for column in range(total.shape[1]) if column != CORRECT]] /= rank_count()  # means
        more = [] if curves is None else [value.to(total.dtype) for value in curves.values()]
        numbers = torch.cat((total.flatten(), *(each.view(1) for each in more))).tolist()  # the one synchronisation
        width = total.shape[1]
        rows = [numbers[first : first + width] for first in range(0, total.numel(), width)]
        for (loss, correct, _, *added), size in zip(rows, self.sizes, strict=True):
            self.loss += loss * size
            self.correct += correct
            self.images += size
            before = self.losses or [0.0] * len(added)
            self.losses = [total + each * size for total, each in zip(before, added, strict=True)]
        self.grad_norm = rows[-1][2]
        now = time.perf_counter()
        self.seconds, self.since, self.rows, self.sizes = self.seconds + now - self.since, now, [], []
        return [row[0] for row in rows], dict(zip(curves or {}, numbers[total.numel() :], strict=True))

    def sums(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: `Meter(**sums)` goes on. It has been read."""
        return {key: value for key, value in vars(self).items() if key not in ("rows", "sizes", "since")}

    def merge(self, other: "Meter") -> None:
        """Add another meter's sums."""
        self.loss += other.loss
        self.correct += other.correct
        self.images += other.images
        self.seconds += other.seconds
        self.waited += other.waited


def arriving(batches: Iterable[Any], window: Callable[[], Meter]) -> Iterator[Any]:
    """The batches; the meter in use takes note of how long each was waited for."""
    waiting, nothing = iter(batches), object()
    while True:
        began = time.perf_counter()
        batch = next(waiting, nothing)
        if batch is nothing:
            return
        window().waited += time.perf_counter() - began
        yield batch


def log_window(run: StageRun, step: int, window: Meter, lr: float, more: Mapping[str, float]) -> None:
    """Log the metrics of the last few steps, and more curves."""
    curves = {
        "loss": window.mean_loss,
        "top1": window.top1,
        "lr": lr,
        "images_per_second": window.images_per_second,
        "data_wait": window.waited / window.seconds,
        "memory_mb": peak_memory(run.device) / 1e6,
        **{name: total / window.images for name, total in zip(window.added, window.losses, strict=True)},
        **more,
    }
    if run.stage.clip_grad_norm is not None:
        curves["grad_norm"] = window.grad_norm
    run.log.scalars(run.name, "train", curves, step)


def peak_memory(device: torch.device) -> int:
    """The most bytes so far: that torch has taken on a CUDA device, or that the process has taken of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def log_epoch(run: StageRun, epoch: int, training: Meter, validation: Evaluation, left: str, note: str = "") -> None:
    """Log the validation metrics, and print one line about the epoch, with the time left and the note at its end."""
    log_validation(run, run.step(epoch + 1), validation)
    parts = [
        f"{run.name} {epoch + 1}/{run.stage.epochs}: val top1 {validation.top1:.2f} %, loss {validation.loss:.3f}",
        f"train {training.top1:.2f} %, {training.mean_loss:.3f}",
        f"{training.images_per_second:.0f} images/s",
        left,
        note,
        _floor_note(run),
    ]
    run.log.say("; ".join(part for part in parts if part))


class Pace:
    """How fast a stage has gone since its construction."""

    def __init__(self) -> None:
        self.began, self.steps = time.perf_counter(), 0

    def left(self, steps: int) -> str:
        """How long so many further steps will take, in words, evaluations included; "" for none.

        >>> pace = Pace()
        >>> pace.began, pace.steps = time.perf_counter() - 60, 100
        >>> pace.left(50), pace.left(600), pace.left(20000), pace.left(0)
        ('30 s left', '6 min left', '3 h 20 min left', '')
        """
        seconds = (time.perf_counter() - self.began) / max(self.steps, 1) * steps
        minutes = round(seconds / 60)
        words = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
        return "" if not steps else f"{words if seconds >= 90 else f'{seconds:.0f} s'} left"


def log_validation(run: StageRun, step: int, validation: Evaluation) -> None:
    """Add a point to the curves of the validation split."""
    run.log.scalars(run.name, "val", {"loss": validation.loss, "top1": validation.top1}, step)


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
    """A warning if a result is at chance level, the same answer for all, or worse than `start`, the top1 before it."""
    advice = f"; try a lower {key} (now {stage.lr:g}) or more epochs" if stage.epochs else ""
    found = f"{name}: val top1 {evaluation.top1:.2f} %"
    chance = evaluation.most_common + _deviation(evaluation.most_common, evaluation.count)
    if evaluation.most_common == 100 or evaluation.top1 <= chance < 100:  # else there are too few images to tell
        luck = f", with luck up to {chance:.2f} %" * (evaluation.top1 > evaluation.most_common)
        return [
            f"{found} is at chance level: the same answer for all {evaluation.count} images gives"
            f" {evaluation.most_common:.2f} %{luck}{advice}"
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
