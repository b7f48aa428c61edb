"""Every figure of a report, in its order: its title, how a healthy one looks, and how it is drawn from a run."""

import base64
import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from qat.training.report.drawing import COLOURS, INK, QUIET, SICK, heat, name_axis, panel, panels
from qat.training.report.findings import AT_FLOOR, LAG
from qat.training.report.run import Points, ReportedRun
from qat.training.run.folder import EVALUATION, LATENCY, SENSITIVITY
from qat.training.run.report import ROWS, deviation_of, results_by_row

Draw: TypeAlias = Callable[[ReportedRun], Any]
"""From a run to a figure of matplotlib; None where the run has nothing for it."""


class Shown(NamedTuple):
    """A figure of the report."""

    title: str
    healthy: str
    draw: Draw


FIGURES: dict[str, Shown] = {}
"""Every figure by the name of its function, which is that of its picture too."""


def _figure(title: str, healthy: str) -> Callable[[Draw], Draw]:
    def add(draw: Draw) -> Draw:
        FIGURES[draw.__name__] = Shown(title, healthy, draw)
        return draw

    return add


NAMED = 5
"""Curves with a name of their own in a figure of many."""

MOVED = 0.01
"""Scales that have moved less have no name."""

FEW_LEVELS = 33
"""Grids of at most so many integers are drawn line by line."""

IN_A_ROW = 8
"""Images of a row."""

MATRIX = 30
"""Most classes of which a matrix can be read."""


@_figure("All curves", "Healthy: QAT begins near where float ended, and its validation loss does not jump up.")
def results(run: ReportedRun) -> Any:
    """Loss, accuracy and rate of all stages over the steps, with the results of calibration and of the integers."""
    stages = list(dict.fromkeys(name.partition("/")[0] for name, tag in run.curves if tag == "loss"))
    if not stages:
        return None
    figure, axes = panels(1, 3, height=2.9)
    titles = {"loss": "loss", "top1": "top-1 %", "lr": "learning rate"}
    for axis, (tag, title) in zip(axes[0], titles.items(), strict=True):
        for stage, colour in zip(stages, COLOURS, strict=False):
            for split, style in (("train", {"alpha": 0.45, "lw": 0.9}), ("val", {"marker": "o", "ms": 2.5})):
                points = run.curves.get((f"{stage}/{split}", tag))
                if points:
                    label = f"{stage} {split}" if tag != "lr" else stage
                    axis.plot(*zip(*points, strict=True), color=colour, label=label, **style)
        axis.set(title=title, xlabel="step")
    exported = run.summary.get("onnx", {}).get("top1")
    if exported is not None:
        axes[0][1].axhline(exported, color=QUIET, ls="--", label="integers")
    ends = [points[-1][1] for (_, tag), points in run.curves.items() if tag == "top1"] + [exported or 100]
    axes[0][1].set_ylim(max(0, min(ends) - 5), 101)  # without the beginning of float
    axes[0][0].set_yscale("log")
    axes[0][2].set(yscale="log", ylim=(max(axes[0][2].get_ylim()[1], 1e-12) * 1e-4, None))
    figure.legend(*axes[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


@_figure(
    "Accuracy",
    "Healthy: QAT and every engine lie within the error bars of float; calibration alone may lie below, and"
    " with few bits far below.",
)
def accuracy(run: ReportedRun) -> Any:
    """A bar for every model and engine, with two standard deviations."""
    top1s = {ROWS[key]: result["top1"] for key, result in results_by_row(run.summary).items()}
    found = [(words, top1) for words, top1 in top1s.items() if top1 is not None]
    for row in run.of_verb(EVALUATION).get("rows", []):
        if row["runtime"] not in ("torch", "float", "onnxruntime"):
            found.append((row["runtime"], row["top1"]))
    images = run.summary.get("val_images", 0)
    if not found or not images:
        return None
    figure, axis = panel(0.6 + 0.28 * len(found))
    errors = [deviation_of(top1, images) for _, top1 in found]
    values = [top1 for _, top1 in found]
    axis.barh(range(len(found)), values, color=COLOURS[0], alpha=0.75, height=0.6)
    axis.errorbar(values, range(len(found)), xerr=errors, fmt="none", ecolor=QUIET, capsize=2)
    low = max(0, min(values) - max(4, 3 * max(errors)))
    for place, (value, error) in enumerate(zip(values, errors, strict=True)):
        axis.text(low, place, f" {value:.2f}", va="center", fontsize=8, weight="bold", color="white")
        axis.set_xlim(low, min(100.5, max(axis.get_xlim()[1], value + error)))
    axis.set_yticks(range(len(found)), [words for words, _ in found])
    axis.invert_yaxis()
    axis.set(xlabel=f"top-1 % of {images:,} images, with two standard deviations")
    return figure


@_figure(
    "Error by layer",
    "Healthy: 30 to 45 dB at 8 bits and about 6 less for each bit, bars of one height; a single low bar is the"
    " layer to blame, and the line falls slowly from input to output.",
)
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


@_figure("Sensitivity", "Healthy: no layer alone costs more than the noise; one that does deserves more bits.")
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


@_figure(
    "Scales",
    "Healthy: lines leave 1 slowly and flatten out, within a factor of 2; jagged lines mean a rate that is too"
    " high, red ones at 1/32 have collapsed.",
)
def scales(run: ReportedRun) -> Any:
    """Every scale relative to where it started; collapsed ones in red, those that moved most by name."""
    figure, axes = panels(1, 2, sharey=True)
    drawn = 0
    for axis, role in zip(axes[0], ("weight", "activation"), strict=True):
        curves, resting = run.by_quantizer("scale", role), run.by_quantizer("at_floor", role)
        floor = {name for name, points in resting.items() if points[-1][1] > AT_FLOOR}
        moved = {name: abs(math.log(max(points[-1][1], 1e-6))) for name, points in curves.items()}
        far = sorted((name for name in moved if moved[name] > MOVED), key=lambda name: -moved[name])[:NAMED]
        for name, points in curves.items():
            points = [(points[0][0] - 1, 1.0), *points]  # where calibration put it
            special = name in floor or name in far
            colour = SICK if name in floor else COLOURS[far.index(name)] if name in far else QUIET
            values = [max(value, 1 / 64) for _, value in points]
            label = name if special and len(axis.get_legend_handles_labels()[0]) < 2 * NAMED else None
            axis.plot([step for step, _ in points], values, color=colour, alpha=1 if special else 0.35, label=label)
        axis.set(yscale="log", xlabel="step", title=f"scales of {role}s, 1 at the start")
        if floor:
            axis.axhline(1 / 32, color=SICK, ls=":", lw=0.8)
        if far or floor:
            axis.legend(loc="best")
        drawn += len(curves)
    low, high = axes[0][0].get_ylim()
    axes[0][0].set_ylim(low if low < 0.3 else 0.5, max(high, 2))
    ticks = [each for each in (1 / 32, 0.1, 0.5, 1, 2, 10, 100) if low / 2 <= each <= 2 * high]
    axes[0][0].set_yticks(ticks, [f"{each:.2g}" for each in ticks])
    axes[0][0].minorticks_off()
    return figure if drawn else None


@_figure(
    "Clipped values",
    "Healthy: near 0 at 8 bits, a few percent at 4 and fewer; a row that lights up has a range that is too narrow.",
)
def clipping(run: ReportedRun) -> Any:
    """The share of values that each tensor clips, over the steps."""
    low, high = run.by_quantizer("clipped_low"), run.by_quantizer("clipped_high")
    both = {
        name: [(step, 100 * (a + b)) for (step, a), (_, b) in zip(low[name], high[name], strict=False)]
        for name in low
        if name in high
    }
    if not both:
        return None
    worst = max(both, key=lambda name: both[name][-1][1])
    return _over_time(both, f"values clipped, %; most at the end: {both[worst][-1][1]:.2g} in {worst}", 5)


@_figure(
    "Levels used",
    "Healthy: most rows are light; a dark row wastes its bits on outliers, or its tensor is nearly constant.",
)
def levels(run: ReportedRun) -> Any:
    """The share of its integers that each tensor uses, over the steps."""
    found = run.by_quantizer("levels").items()
    used = {name: [(step, 100 * share) for step, share in points] for name, points in found}
    return _over_time(used, "levels used, %", 100)


def _over_time(rows: dict[str, Points], label: str, most: float) -> Any:
    if not rows:
        return None
    figure, axis = panel(1 + 0.09 * min(len(rows), 60))
    heat(figure, axis, rows, label, most)
    return figure


@_figure(
    "Weights that turn round",
    "Healthy: near 0 at the end, as the learning rate is; a line that stays up is a layer whose weights jump"
    " between two integers, which is common below 4 bits.",
)
def oscillation(run: ReportedRun) -> Any:
    """The share of weights that turn round, by layer."""
    curves = run.by_quantizer("oscillating")
    if not curves:
        return None
    figure, axis = panel()
    most = sorted(curves, key=lambda name: -max(value for _, value in curves[name]))[:NAMED]
    for name, points in curves.items():
        named = {"color": COLOURS[most.index(name)], "label": name} if name in most else {"color": QUIET, "alpha": 0.35}
        axis.plot([step for step, _ in points], [100 * share for _, share in points], **named)
    axis.set(xlabel="step", ylabel="% of a layer's weights", ylim=(0, None))
    axis.legend()
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


@_figure(
    "The six worst layers on their grids",
    "Healthy: the values (blue; orange: before QAT) fill the grid (green), little lies outside; peaks at the"
    " ends of a weight are the largest value of each channel.",
)
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


@_figure(
    "BatchNorm: running statistics against batches",
    "Healthy: all bars below 0.1; above 0.25 evaluation normalises otherwise than training did.",
)
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


@_figure(
    "Answers that changed",
    "Healthy: few, and scattered; a whole column in red is a class that now wins where it should not.",
)
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


@_figure(
    "Images whose right answer was lost",
    "Healthy: few, and hard ones; the float model named them rightly (first line), the integers do not (second).",
)
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


@_figure(
    "Integers that differ",
    "Healthy: none, or some in a million, which are near-ties; red ones are no ties: the file is another function.",
)
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
        colours = [SICK if row["beyond_ties"] > 0 else COLOURS[number] for row in rows]
        axis.bar([place + number * width for place in range(len(rows))], shares, width, color=colours, label=engine)
    axis.set_yscale("symlog", linthresh=1)
    axis.set(ylabel="of a million differ", ylim=(0, max(10, axis.get_ylim()[1])))
    if axis.get_ylim()[1] <= 10:
        axis.set_yticks([0, 1, 2, 5, 10], ["0", "1", "2", "5", "10"])
    name_axis(axis, names)
    axis.legend()
    return figure


@_figure("Cost by layer", "To read: bits saved where the bars are high matter; a layer in float stands out.")
def costs(run: ReportedRun) -> Any:
    """Bit operations and bytes of each layer."""
    rows = run.analysis.get("cost")
    if not rows:
        return None
    figure, axes = panels(2, 1, height=1.7, sharex=True)
    kinds = (("bops", "10^9 bit operations", 1e9), ("weight_bytes", "kB", 1e3))
    for [axis], (key, label, unit) in zip(axes, kinds, strict=True):
        axis.bar(range(len(rows)), [row[key] / unit for row in rows], color=COLOURS[0], alpha=0.75)
        axis.set(ylabel=label)
    name_axis(axes[1][0], [row["name"] for row in rows])
    return figure


@_figure("Latency", "Healthy: integers take less time than float on the device that counts.")
def latency(run: ReportedRun) -> Any:
    """Milliseconds of a call, integers beside float."""
    rows = run.of_verb(LATENCY).get("rows")
    if not rows:
        return None
    figure, axis = panel(0.6 + 0.2 * len(rows))
    colours = [QUIET if row["model"] == "float" else COLOURS[0] for row in rows]
    bars = axis.barh(range(len(rows)), [row["milliseconds"] for row in rows], color=colours)
    axis.bar_label(bars, fmt="%.2f", fontsize=6, color=INK)
    names = [f"{row['model']}, batch {row['batch']}, {row['threads']} threads" for row in rows]
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set(xlabel="ms a call")
    return figure
