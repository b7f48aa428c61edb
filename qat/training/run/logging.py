"""Output of a run: TensorBoard curves, lines on standard output, progress bars."""

import re
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from qat.analysis.table import quantizers_in_order
from qat.collectives import rank

CURVES = "curves"  # TensorBoard's files, in a folder for each stage and split, so that one chart has all of them
OF_QUANTIZERS = "quantizer_"  # prefix of quantizers' curves: TensorBoard then sorts loss and accuracy before them


class RunLog:
    """Curves and text of a run. Of many ranks, only the first writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.writes = folder, rank() == 0
        self._first: dict[str, int] = {}
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def begin(self, stage: str, step: int) -> None:
        """Set the first step of a stage's curves; points of an earlier start are hidden."""
        self._first.setdefault(stage, step)

    def scalars(self, stage: str, split: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve of a stage and a split (`train` or `val`)."""
        if self.writes and values:
            from tensorboard.compat.proto.summary_pb2 import Summary

            writer = self.writer(f"{stage}/{split}", self._first.get(stage))
            points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.file_writer.add_summary(Summary(value=points), step)  # one event; add_scalar writes one for each
            writer.flush()  # a run that is killed goes on from last.pt, and so must its curves

    def writer(self, run: str = "", first: int | None = None) -> Any:
        """Return torch's SummaryWriter of a stage and split; "" for the whole run."""
        if run not in self._writers:
            from torch.utils.tensorboard import SummaryWriter  # late, since TensorBoard takes time

            self._writers[run] = SummaryWriter(str(self.folder / CURVES / run), purge_step=first)
        return self._writers[run]

    def say(self, text: str) -> None:
        if self.writes:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


HEADINGS = {  # kinds of quantizer curves, and the titles of their charts
    "scale": "scales, 1 at the start",
    "sqnr": "error, dB",
    "clipped_high": "share clipped above",
    "clipped_low": "share clipped below",
    "levels": "share of levels used",
    "oscillating": "share of weights that turn round",
    "gradient": "gradient of scales",
}
COMMON = ("loss", "top1", "lr", "images_per_second", "data_wait", "memory_mb")
TOGETHER = 12  # curves in a chart, at most
WORST = 10  # curves in the chart of the worst tensors


def add_layout(log: RunLog, model: nn.Module, statistics: dict[str, dict[str, float]]) -> None:
    """Group the curves of a model's quantizers for the page Custom Scalars."""
    worst = sorted(statistics, key=lambda name: statistics[name]["sqnr"])[:WORST]

    def one_of(kind: str, names: list[str]) -> str:
        return f"^{OF_QUANTIZERS}{kind}/({'|'.join(map(re.escape, names))})$"

    charts = {"training": {tag: f"^{tag}$" for tag in COMMON}}
    charts["what to look at first"] = {
        "lowest SQNR after calibration": one_of("sqnr", worst),
        "scales on their floor (none is healthy)": f"^{OF_QUANTIZERS}at_floor/",
    }
    stages = stages_of(quantizers_in_order(model))
    for kind, title in HEADINGS.items():
        charts[title] = {f"{kind}: {stage}": one_of(kind, group) for stage, group in stages.items()}
    layout = {title: {name: ["Multiline", [tags]] for name, tags in each.items()} for title, each in charts.items()}
    log.writer().add_custom_scalars(layout)
    log.writer().flush()


def stages_of(names: list[str]) -> dict[str, list[str]]:
    """Group names by their part of the network, at most twelve a group, in order.

    >>> names = ["conv1_quantizer", "layer1.0.conv1_quantizer", "layer1.0.conv2_quantizer", "layer2.0.conv1_quantizer"]
    >>> stages_of(names)["layer1"]
    ['layer1.0.conv1_quantizer', 'layer1.0.conv2_quantizer']
    """
    stages: dict[str, list[str]] = {}
    for stage, group in groupby(names, lambda name: name.partition(".")[0]):
        stages.setdefault(stage, []).extend(group)
    return {
        stage if len(group) <= TOGETHER else f"{stage} {1 + first // TOGETHER}": group[first : first + TOGETHER]
        for stage, group in stages.items()
        for first in range(0, len(group), TOGETHER)
    }


def on_terminal() -> bool:
    """Return True if this is the first rank, with a terminal as standard error."""
    return sys.stderr.isatty() and rank() == 0


def progress_bar(batches: Iterable[Any], description: str | None) -> "tqdm[Any]":
    """Iterate with a bar on the terminal; as a context manager, errors clear it too."""
    hidden = description is None or not on_terminal()  # in a file, the line of each epoch is enough
    return tqdm(batches, desc=description, disable=hidden, unit="batch", leave=False, dynamic_ncols=True)
