"""Curves and lines of a stage: sums over images, quantizers, time left."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qat.analysis.statistics import learned_statistics, statistics_collected, weight_samples
from qat.collectives import rank, rank_count, summed
from qat.quantizer import Quantizer
from qat.quantizer.training import scales_at_minimum
from qat.training.config.schema import RunConfig
from qat.training.loop.evaluation import Evaluation
from qat.training.loop.stage import Batch, StageRun, rate_key
from qat.training.run.folder import State
from qat.training.run.logging import OF_QUANTIZERS, RunLog

resource: Any = importlib.import_module("resource") if os.name == "posix" else None  # Windows has none
CORRECT = 1  # column of a step's row that is a sum over images; the others are means


@dataclass
class Meter:
    """Sums over training images on the host, and recent results on the device."""

    loss: float = 0.0
    correct: float = 0.0
    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0  # seconds of these without a next batch
    grad_norm: float = 0.0
    added: list[str] = field(default_factory=list)  # names of losses that aids and rules add
    losses: list[float] = field(default_factory=list)  # sums of these, as in `loss`
    rows: list[Tensor] = field(default_factory=list)  # results of recent steps, on the device
    sizes: list[int] = field(default_factory=list)  # images of these steps
    since: float = field(default_factory=time.perf_counter)

    @property
    def results(self) -> dict[str, float]:
        """Mean loss, right answers in percent (in training mode), and speed with data loading."""
        right, speed = 100.0 * self.correct / self.images, self.images / self.seconds
        return {"loss": self.loss / self.images, "right": right, "images_per_second": speed}

    def read(self, curves: Mapping[str, Tensor] | None = None) -> tuple[list[float], dict[str, float]]:
        """Wait for the device, add up the rows; return the losses and values of curves.

        All ranks read at the same time, and get the same results; values of curves are of this rank alone.
        """
        if not self.rows:
            return [], {}
        total = summed(torch.stack(self.rows))
        total[:, [column for column in range(total.shape[1]) if column != CORRECT]] /= rank_count()  # means again
        more = [value.to(total.dtype).view(1) for value in (curves or {}).values()]
        numbers = torch.cat((total.flatten(), *more)).tolist()  # the only synchronisation with the device
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

    def sums(self) -> dict[str, object]:
        """Return the fields for a checkpoint, after `read`; `Meter(**sums)` goes on."""
        return {key: value for key, value in vars(self).items() if key not in ("rows", "sizes", "since")}

    def merge(self, other: "Meter") -> None:
        for key in ("loss", "correct", "images", "seconds", "waited"):
            setattr(self, key, getattr(self, key) + getattr(other, key))


def timed(batches: Iterable[Batch], window: Callable[[], Meter]) -> Iterator[Batch]:
    """Yield the batches, and add the time that each was waited for to the meter."""
    waiting = iter(batches)
    while True:
        began = time.perf_counter()
        batch = next(waiting, None)
        if batch is None:
            return
        window().waited += time.perf_counter() - began
        yield batch


def log_window(run: StageRun, step: int, window: Meter, lr: float, more: Mapping[str, float]) -> None:
    results = window.results
    right, metric = results.pop("right"), run.config.task.train_metric
    curves = {
        **({metric: right} if metric else {}),
        **results,
        "lr": lr,
        "data_wait": window.waited / window.seconds,
        "memory_mb": peak_memory(run.device) / 1e6,
        **{name: total / window.images for name, total in zip(window.added, window.losses, strict=True)},
        **more,
    }
    if run.stage.clip_grad_norm is not None:
        curves["grad_norm"] = window.grad_norm
    run.log.scalars(run.name, "train", curves, step)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes so far: torch's on a CUDA device, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def log_epoch(run: StageRun, epoch: int, training: Meter, validation: Evaluation, left: str, note: str = "") -> None:
    task = run.config.task
    run.log.scalars(run.name, "val", {"loss": validation.loss, task.metric: validation.score}, run.step(epoch + 1))
    parts = [
        f"{run.name} {epoch + 1}/{run.stage.epochs}: val {task.title} {validation.score:.2f} %,"
        f" loss {validation.loss:.3f}",
        (
            "train " + "{right:.2f} %, " * bool(task.train_metric) + "{loss:.3f}; {images_per_second:.0f} images/s"
        ).format(**training.results),
        *(left, note),
    ]
    counts = scales_at_minimum(run.model)
    resting, total = (sum(each) for each in zip(*counts.values(), strict=True)) if counts else (0, 0)
    if resting:
        most, rate = max(counts, key=lambda name: counts[name][0]), rate_key(run.config, run.name)
        what = f"{resting:,} of {total:,} learned scales rest on their floor ({most} has most)"
        parts.append(f"{what}: a lower {rate} or qat.quantizer_lr_factor may help")
    run.log.say("; ".join(filter(None, parts)))


class Pace:
    """Speed of a stage since its construction."""

    def __init__(self) -> None:
        self.began, self.steps = time.perf_counter(), 0

    def left(self, steps: int) -> str:
        """Say how long further steps will take, evaluations included; "" for none.

        >>> pace = Pace()
        >>> pace.began, pace.steps = time.perf_counter() - 60, 100
        >>> pace.left(50), pace.left(600), pace.left(20000), pace.left(0)
        ('30 s left', '6 min left', '3 h 20 min left', '')
        """
        seconds = (time.perf_counter() - self.began) / max(self.steps, 1) * steps
        minutes = round(seconds / 60)
        words = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
        return "" if not steps else f"{words if seconds >= 90 else f'{seconds:.0f} s'} left"


AT_FLOOR = f"{OF_QUANTIZERS}at_floor/"


class Watch:
    """Curves of a stage's quantizers between evaluations; rank 0 draws for all."""

    def __init__(self, run: StageRun) -> None:
        self.run, self.detail = run, run.config.watch if rank() == 0 else "off"
        found = {name: each for name, each in run.model.named_modules() if isinstance(each, Quantizer)}
        self.quantizers = {} if self.detail == "off" else found
        self.gradients: dict[str, Tensor] = {}
        self.rested = set[str]()  # tags of scales that were once on their floor
        self.codes: dict[str, Tensor] = {}  # by weight, a sample of its integers at the last point
        self.directions: dict[str, Tensor] = {}  # of their last moves

    def keep_gradients(self) -> None:
        """Keep the norms of the gradients of a step, before they are gone."""
        self.gradients = {}
        for name, quantizer in self.quantizers.items():
            if gradients := [p.grad for p in quantizer.parameters() if p.grad is not None]:
                self.gradients[f"gradient/{name}"] = nn.utils.get_total_norm(gradients)

    @torch.no_grad()
    def curves(self) -> dict[str, Tensor]:
        """Return learned values and gradients, each of shape () on the device."""
        turned = self._turned() if self.quantizers and self.detail == "all" else {}
        curves = {**learned_statistics(self.quantizers), **self.gradients, **turned}
        return {f"{OF_QUANTIZERS}{tag}": value for tag, value in curves.items()}

    def worth_drawing(self, curves: dict[str, float]) -> dict[str, float]:
        """Return the curves without those of scales that never rested on their floor."""
        # A curve of 0 for each quantizer would hide the few that are a bad sign.
        self.rested |= {tag for tag, value in curves.items() if tag.startswith(AT_FLOOR) and value}
        return {tag: value for tag, value in curves.items() if not tag.startswith(AT_FLOOR) or tag in self.rested}

    def state_dict(self) -> State:
        """Return what the next points of the curves depend on."""
        return {"rested": sorted(self.rested), "codes": self.codes, "directions": self.directions}

    def load_state_dict(self, state: State) -> None:
        self.rested = set(state["rested"])
        for kept, saved in ((self.codes, state["codes"]), (self.directions, state["directions"])):
            kept.update({name: values.to(self.run.device) for name, values in saved.items()})

    # The share of integers that moved since the last point, against their move before.
    def _turned(self) -> dict[str, Tensor]:
        names = {each: name for name, each in self.quantizers.items()}
        curves = {}
        for quantizer, read in weight_samples(self.run.model).items():
            if not (quantizer.uniform and quantizer.exportable):
                continue
            name, codes = names[quantizer], quantizer.compute_codes(read()).to(torch.int16)
            if name in self.codes and self.codes[name].shape == codes.shape:
                moved = torch.sign(codes - self.codes[name]).to(torch.int8)
                before = self.directions.get(name, torch.zeros_like(moved))
                curves[f"oscillating/{name}"] = (moved * before < 0).float().mean()
                self.directions[name] = torch.where(moved == 0, before, moved)
            self.codes[name] = codes
        return curves


@contextmanager
def looking(config: RunConfig, model: nn.Module, log: RunLog, stage: str, step: int) -> Iterator[State]:
    """Draw what the quantizers do in the first batch of an evaluation."""
    if config.watch != "all" or rank() != 0:
        yield {}
        return
    with statistics_collected(model) as found:
        yield found
    curves = {f"{OF_QUANTIZERS}{key}/{name}": row[key] for name, row in found.items() for key in row}
    log.scalars(stage, "train", curves, step)
