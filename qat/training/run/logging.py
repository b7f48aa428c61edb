"""A run's output: TensorBoard curves, grouped; lines and tables on standard output, progress bars on the terminal."""

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

CURVES = "curves"
"""The folder of TensorBoard's files in a run folder: a folder for each stage and split, so that one chart has all."""

OF_QUANTIZERS = "quantizer_"
"""How the headings of quantizers' curves begin, so that TensorBoard shows loss and accuracy before them."""


class RunLog:
    """The curves and the text of a run. Of many ranks, the first writes; it goes on alone at the end."""

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
        """Say where the curves of a stage begin, before its first point; what an earlier start drew is hidden."""
        self._first.setdefault(stage, step)

    def scalars(self, stage: str, split: str, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve of a stage, on `train` or `val`; curves of one name share a chart."""
        if self.writes and values:
            from tensorboard.compat.proto.summary_pb2 import Summary

            writer = self.writer(f"{stage}/{split}", self._first.get(stage))
            points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.file_writer.add_summary(Summary(value=points), step)  # one event; add_scalar writes one for each
            writer.flush()  # a run that is killed goes on from last.pt, and so must its curves

    def writer(self, run: str = "", first: int | None = None) -> Any:
        """torch's SummaryWriter of a run in TensorBoard; "" for what is of no stage."""
        if run not in self._writers:
            from torch.utils.tensorboard import SummaryWriter  # late, since TensorBoard takes time

            self._writers[run] = SummaryWriter(str(self.folder / CURVES / run), purge_step=first)
        return self._writers[run]

    def say(self, text: str) -> None:
        """Print text on standard output, above a progress bar if there is one."""
        if self.writes:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()


HEADINGS = {
    "scale": "scales, 1 at the start",
    "sqnr": "error, dB",
    "clipped_high": "share clipped above",
    "clipped_low": "share clipped below",
    "levels": "share of levels used",
    "oscillating": "share of weights that turn round",
    "gradient": "gradient of scales",
}
"""The curves that are grouped, and the titles of their charts."""

COMMON = ("loss", "top1", "lr", "images_per_second", "data_wait", "memory_mb")
TOGETHER, WORST = 12, 10  # most curves of a chart, and how many tensors the chart of the worst has


def add_layout(log: RunLog, model: nn.Module, statistics: dict[str, dict[str, float]]) -> None:
    """Group the curves of a calibrated model's quantizers for the page Custom Scalars."""
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
    """The names by the part of the network that they are in, at most twelve a group, in their order.

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
    """Whether standard error is a terminal, where the first rank can draw a bar."""
    return sys.stderr.isatty() and rank() == 0


def progress_bar(batches: Iterable[Any], description: str | None) -> "tqdm[Any]":
    """Iterate with a bar on the terminal, if there is a description; a context manager, so that errors clear it too."""
    hidden = description is None or not on_terminal()  # a log has a line for every epoch
    return tqdm(batches, desc=description, disable=hidden, unit="batch", leave=False, dynamic_ncols=True)
