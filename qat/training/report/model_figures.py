"""Figures of the trained model: errors by layer, histograms on their grids, changed answers, differing integers."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from qat.training.report.drawing import COLOURS, INK, QUIET, SICK, name_axis, panel, panels
from qat.training.report.findings import LAG
from qat.training.report.run import ReportedRun
from qat.training.run.folder import LATENCY, SENSITIVITY

FEW_LEVELS = 33
"""Grids of at most so many integers are drawn line by line."""

IN_A_ROW = 8
"""Images of a row."""

MATRIX = 30
"""Most classes of which a matrix can be read."""


def errors(run: ReportedRun) -> Any:
    """Local and cumulative SQNR of each layer, from input to output."""
    rows = run.analysis.get("layers")
    if not rows:
        return None
    figure, axis = panel(3.2)
    places = range(len(rows))
    local = [np.nan if row["local"] is None else row["local"] for row in rows]
    axis.bar(places, local, color=COLOURS[0], alpha=0.6, label="this layer alone")
    axis.plot(places, [row["cumulative"] for row in rows], color=COLOURS[1], marker="o", ms=2.5, label="all so far")
    name_axis(axis, [row["name"] for row in rows])
    axis.set(ylabel="SQNR, dB")
    axis.legend()
    return figure


def sensitivity(run: ReportedRun) -> Any:
    """What `python -m qat sensitivity` has measured."""
    found = run.of_verb(SENSITIVITY)
    return sensitivity_figure(found) if found else None


def sensitivity_figure(result: dict[str, Any]) -> Any:
    """Bars for each layer, first to last, of sensitivity.json: the loss with only this part quantized, less float's."""
    weights = f"{result.get('weights', 'calibrated')} weights"
    layers, floor = result["layers"], result["float"]["loss"]
    figure, axis = panel(1 + 0.22 * len(layers))
    for number, (part, words) in enumerate((("weight", "weights"), ("activation", "activations"))):
        rows = [(place, row["only"][part]["loss"]) for place, row in enumerate(layers) if part in row["only"]]
        places, losses = [place + 0.4 * number - 0.2 for place, _ in rows], [loss - floor for _, loss in rows]
        axis.barh(places, losses, height=0.4, label=words, color=COLOURS[number])
    axis.set_yticks(range(len(layers)), [row["name"] for row in layers])
    axis.set_ylim(len(layers) - 0.4, -0.6)
    axis.set(xlabel=f"loss above float, with only this quantized ({result['images']:,} images; {weights})")
    axis.legend()
    return figure


def histograms(run: ReportedRun) -> Any:
    """Weight, before and after, and input of the six worst layers, on their grids."""
    rows = run.analysis.get("histograms")
    if not rows:
        return None
    figure, axes = panels(len(rows), 2, height=1.35)
    for pair, row in zip(axes, rows, strict=True):
        for axis, key in zip(pair, ("weight", "input"), strict=True):
            axis.set_title(f"{row['layer']}: {key}", fontsize=7)
            axis.grid(False)
            if row.get(key):
                _histogram(axis, row[key], row.get("before") if key == "weight" else None)
    return figure


def _histogram(axis: Any, found: dict[str, Any], before: dict[str, Any] | None) -> None:
    qmin, qmax = found["qmin"], found["qmax"]
    edges = np.linspace(found["low"], found["high"], len(found["shares"]) + 1)
    axis.axvspan(qmin - 0.5, qmax + 0.5, color=COLOURS[2], alpha=0.1, lw=0)
    lines = range(qmin, qmax + 1) if qmax - qmin < FEW_LEVELS else (qmin, qmax)
    axis.vlines(list(lines), 0, 1, transform=axis.get_xaxis_transform(), color=COLOURS[2], lw=0.5)
    axis.stairs(found["shares"], edges, fill=True, color=COLOURS[0], alpha=0.7)
    if before:
        axis.stairs(before["shares"], edges, color=COLOURS[1], lw=0.8)
    axis.set_yscale("log")
    axis.tick_params(labelsize=5)


def confusion(run: ReportedRun) -> Any:
    """How many answers more or fewer each truth gets than from the float model."""
    answers = run.analysis.get("answers")
    if not answers or len(answers["classes"]) > MATRIX or not answers["changes"]:
        return None
    names = [name.replace("$", r"\$") for name in answers["classes"]]  # else a formula
    change = np.zeros((len(names), len(names)), int)
    for truth, before, after, number in answers["changes"]:
        change[truth, before] -= number
        change[truth, after] += number
    figure, axis = panel(3.6)
    most = max(1, abs(change).max())
    picture = axis.imshow(change, cmap="coolwarm", vmin=-most, vmax=most)
    for row, column in zip(*change.nonzero(), strict=True):
        axis.text(column, row, f"{change[row, column]:+d}", ha="center", va="center", fontsize=6, color="black")
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    axis.grid(False)
    axis.set(xlabel="answer", ylabel="truth")
    figure.colorbar(picture, ax=axis, fraction=0.04)
    return figure


def lost(run: ReportedRun) -> Any:
    """Images that the float model names rightly and the integers do not."""
    images = run.analysis.get("answers", {}).get("lost")
    if not images:
        return None
    figure, axes = panels(-(-len(images) // IN_A_ROW), IN_A_ROW, height=1.3)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, each in zip(axes.flat, images, strict=False):
        axis.imshow(Image.open(io.BytesIO(base64.b64decode(each["png"]))))
        axis.set_title(f"{each['truth']}\n→ {each['answer']}".replace("$", r"\$"), fontsize=6)
    return figure


def integers(run: ReportedRun) -> Any:
    """How many integers of each tensor differ between torch and each engine."""
    engines = {name: rows for name, rows in run.analysis.get("integers", {}).items() if rows}
    if not engines:
        return None
    figure, axis = panel(3)
    width = 0.8 / len(engines)
    names: list[str] = []
    for number, (engine, rows) in enumerate(engines.items()):
        names = [row["name"] for row in rows]
        shares = [1e6 * row["differing"] / max(row["elements"], 1) for row in rows]
        beyond = [row["beyond_ties"] > 0 for row in rows]
        colours = [SICK if each else COLOURS[number] for each in beyond]
        axis.bar([place + number * width for place in range(len(rows))], shares, width, color=colours, label=engine)
    axis.set_yscale("symlog", linthresh=1)
    axis.set(ylabel="of a million differ", ylim=(0, max(10, axis.get_ylim()[1])))
    if axis.get_ylim()[1] <= 10:
        axis.set_yticks([0, 1, 2, 5, 10], ["0", "1", "2", "5", "10"])
    name_axis(axis, names)
    axis.legend()
    return figure


def batch_norm(run: ReportedRun) -> Any:
    """How far each BatchNorm's running statistics are from the batches'."""
    lag = run.analysis.get("batch_norm")
    if not lag:
        return None
    figure, axis = panel(2.6)
    colours = [SICK if value > LAG else COLOURS[0] for value in lag.values()]
    axis.bar(range(len(lag)), list(lag.values()), color=colours)
    axis.axhline(LAG, color=SICK, ls=":", lw=0.8)
    axis.set(ylabel="lag, in deviations", ylim=(0, None))
    name_axis(axis, list(lag))
    return figure


def costs(run: ReportedRun) -> Any:
    """Bit operations and bytes of each layer."""
    rows = run.analysis.get("cost")
    if not rows:
        return None
    figure, axes = panels(2, 1, height=1.7, sharex=True)
    for [axis], (key, label, unit) in zip(
        axes, (("bops", "10^9 bit operations", 1e9), ("weight_bytes", "kB", 1e3)), strict=True
    ):
        axis.bar(range(len(rows)), [row[key] / unit for row in rows], color=COLOURS[0], alpha=0.75)
        axis.set(ylabel=label)
    name_axis(axes[1][0], [row["name"] for row in rows])
    return figure


def latency(run: ReportedRun) -> Any:
    """Milliseconds of a call, integers beside float."""
    rows = run.of_verb(LATENCY).get("rows")
    if not rows:
        return None
    figure, axis = panel(0.6 + 0.2 * len(rows))
    colours = [QUIET if row["model"] == "float" else COLOURS[0] for row in rows]
    bars = axis.barh(range(len(rows)), [row["milliseconds"] for row in rows], color=colours)
    axis.bar_label(bars, fmt="%.2f", fontsize=6, color=INK)
    axis.set_yticks(
        range(len(rows)), [f"{row['model']}, batch {row['batch']}, {row['threads']} threads" for row in rows]
    )
    axis.invert_yaxis()
    axis.set(xlabel="ms a call")
    return figure
