"""A tiny quantized CNN, tiny batches, and processes that work together, for tests of training and calibration."""

import math
import os
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensorboard.summary.writer import event_file_writer
from torch import Tensor, nn

from qat.quantizer import create_quantizer
from qat.spec import QuantSpec
from qat.training.config.schema import RunConfig
from qat.training.config.stages import StageConfig
from qat.training.errors import UserError
from qat.training.loop.engine import train_stage
from qat.training.loop.stage import StageRun
from qat.training.report.findings import ReportedRun
from qat.training.run.checkpoint import StageState, load_checkpoint, restore_model
from qat.training.run.logging import RunLog

CPU = torch.device("cpu")

Patch, Captured, Logged = pytest.MonkeyPatch, pytest.CaptureFixture[str], pytest.LogCaptureFixture

# TensorBoard reads files in the order of their names, which end with this count: .10 would come before .9.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)

MOST_SECONDS = 200  # after which `on_ranks` ends its processes

Outputs = namedtuple("Outputs", ["aux", "logits"])


def user_error(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """The sentences of the UserError that a call raises."""
    with pytest.raises(UserError) as raised:
        call(*arguments, **named)
    return str(raised.value)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points (step, value) that TensorBoard reads in a run folder, by `stage/split/tag`."""
    return {f"{run}/{tag}": points for (run, tag), points in ReportedRun(folder).curves.items()}


class TinyBatches:
    """24 images of two classes, in a new order each epoch; raises KeyboardInterrupt at `fail_at` (epoch, batch)."""

    def __init__(self, batch_size: int = 5, fail_at: tuple[int, int] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.arange(24) % 2
        self.images = torch.randn(24, 3, 8, 8, generator=generator) + self.labels.view(-1, 1, 1, 1)
        self.batch_size, self.fail_at, self.epoch = batch_size, fail_at, 0
        self.first = 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        return math.ceil(24 / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.first:
            torch.rand(())  # a DataLoader draws its seed from the global generator too, but not that of the trainer
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch))
        for number, chosen in list(enumerate(order.split(self.batch_size), 1))[self.first :]:
            if (self.epoch, number) == self.fail_at:
                raise KeyboardInterrupt
            yield self.images[chosen], self.labels[chosen]


def tiny_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.conv = nn.Conv2d(3, 4, 3)
    model.bn = nn.BatchNorm2d(4)
    model.relu = nn.ReLU()
    model.quantizer = create_quantizer(QuantSpec(signed=False, symmetric=False))
    model.quantizer.set_range(torch.tensor(0.0), torch.tensor(3.0))
    model.pool = nn.AdaptiveAvgPool2d(1)
    model.flatten = nn.Flatten()
    model.dropout = nn.Dropout(0.3)
    model.fc = nn.Linear(4, 2)
    return model


class Returns(nn.Module):
    """Wraps logits into what some models return."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.fc, self.wrap = nn.Linear(192, 2), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.fc(x.flatten(1)))


def on_ranks(work: Callable[[int], dict[str, Any]], folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """What `work(rank)` finds in each of some processes under torch.distributed, each on one thread."""
    context = mp.get_context("spawn")
    workers = [context.Process(target=_on_a_rank, args=(work, rank, folder, count)) for rank in range(count)]
    try:
        for worker in workers:
            worker.start()
        deadline = time.monotonic() + MOST_SECONDS
        # A rank that fails leaves the others waiting for it.
        while any(each.is_alive() for each in workers) and not any(each.exitcode for each in workers):
            assert time.monotonic() < deadline, f"ranks run for more than {MOST_SECONDS} s"
            time.sleep(0.02)
        assert [each.exitcode for each in workers] == [0] * count, "by rank; None: still waits for another"
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join(10)
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def _on_a_rank(work: Callable[[int], dict[str, Any]], rank: int, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), world_size=count, rank=rank)
    torch.save(work(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()


def stage_run(folder: Path, model: nn.Module, stage: StageConfig, **changes: Any) -> StageRun:
    folder.mkdir(exist_ok=True)
    config = RunConfig(**{"log_every": 2, **changes.pop("config", {})})
    return StageRun(
        name="qat",
        stage=stage,
        config=config,
        model=model,
        train=changes.pop("train", TinyBatches()),
        val=changes.pop("val", TinyBatches(7)),
        device=changes.pop("device", CPU),
        log=RunLog(folder),
        folder=folder,
        **changes,
    )


def train(run: StageRun, state: StageState | None = None) -> Any:
    with run.log:
        return train_stage(run, state)


def resume(run: StageRun) -> Any:
    """Load last.pt of the run's folder into its model, and train on."""
    checkpoint = load_checkpoint(run.folder / "last.pt")
    restore_model(run.folder / "last.pt", checkpoint, run.model)
    return train(run, StageState(**checkpoint["state"]))
