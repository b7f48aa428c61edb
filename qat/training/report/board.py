"""What TensorBoard shows besides scalars: curves grouped by part of the network, pictures, text, runs as a table."""

import re
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from qat.analysis.table import quantizers_in_order
from qat.training.config.file import dump_config, flat
from qat.training.config.schema import RunConfig
from qat.training.report.figures import FIGURES
from qat.training.report.page import write_report
from qat.training.report.run import ReportedRun
from qat.training.run.folder import LAYERS, PICTURES, REPORT, RESULTS
from qat.training.run.logging import OF_QUANTIZERS, RunLog

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

TOGETHER, WORST = 12, 10
"""Most curves of a chart, and how many tensors the chart of the worst has."""


def add_layout(log: RunLog, model: nn.Module, statistics: dict[str, dict[str, float]]) -> None:
    """Group the curves of a calibrated model's quantizers for the page Custom Scalars."""
    worst = sorted(statistics, key=lambda name: statistics[name]["sqnr"])[:WORST]
    layout: dict[str, Any] = {
        "training": {tag: ["Multiline", [f"^{tag}$"]] for tag in COMMON},
        "what to look at first": {
            "lowest SQNR after calibration": ["Multiline", [_one_of("sqnr", worst)]],
            "scales on their floor (none is healthy)": ["Multiline", [f"^{OF_QUANTIZERS}at_floor/"]],
        },
    }
    stages = stages_of(quantizers_in_order(model))
    for kind, title in HEADINGS.items():
        layout[title] = {f"{kind}: {stage}": ["Multiline", [_one_of(kind, group)]] for stage, group in stages.items()}
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


def _one_of(kind: str, names: list[str]) -> str:
    return f"^{OF_QUANTIZERS}{kind}/({'|'.join(map(re.escape, names))})$"


def finish(log: RunLog, config: RunConfig, summary: dict[str, Any], step: int) -> None:
    """Write the report of a run, and give TensorBoard its text, its figures, and its row in the table of runs."""
    if config.watch == "off":
        return
    from torch.utils.tensorboard.summary import hparams

    said = write_report(log.folder / REPORT, [ReportedRun.read(log.folder)], pictures=True)
    log.say("\n".join([*said, f"report: {log.folder / REPORT}"]))
    writer = log.writer()
    layers = (log.folder / LAYERS).read_text(encoding="utf-8")
    for tag, text in (("config", dump_config(config)), ("layers", layers)):
        writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()))
    metrics = _metrics(summary)
    given = flat(config.model_dump(mode="json", exclude_defaults=True))
    row = {key: value for key, value in given.items() if isinstance(value, bool | int | float | str)}
    for summary_of in hparams(row, metrics):  # type: ignore[no-untyped-call]
        writer.file_writer.add_summary(summary_of)
    for tag, value in metrics.items():
        writer.add_scalar(tag, value, step)
    for file in (log.folder / RESULTS, *(log.folder / PICTURES / f"{key}.png" for key in FIGURES)):
        if file.is_file():  # without matplotlib there is none
            with Image.open(file) as picture:
                writer.add_image(file.stem, np.asarray(picture.convert("RGB")), step, dataformats="HWC")
    writer.flush()


def _metrics(summary: dict[str, Any]) -> dict[str, float]:
    found = {f"{key}_top1": summary.get(key, {}).get("top1") for key in ("float", "calibrated", "qat", "onnx")}
    found |= {"agreement": summary.get("onnx", {}).get("agreement"), "seconds": summary["seconds"]}
    return {f"final/{key}": float(value) for key, value in found.items() if value is not None}
