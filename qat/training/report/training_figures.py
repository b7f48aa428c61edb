"""Figures of how a run trained: its curves, its accuracies, and what its quantizers did meanwhile."""

import math
from typing import Any

from qat.training.report.drawing import COLOURS, QUIET, SICK, heat, panel, panels, percent
from qat.training.report.findings import AT_FLOOR
from qat.training.report.run import ReportedRun
from qat.training.run.folder import EVALUATION
from qat.training.run.report import ROWS, deviation_of

NAMED = 5
"""Curves with a name of their own in a figure of many."""

MOVED = 0.01
"""Scales that have moved less have no name."""


def results(run: ReportedRun) -> Any:
    """Loss, accuracy and rate of all stages over the steps, with the results of calibration and of the integers."""
    stages = list(dict.fromkeys(name.partition("/")[0] for name, tag in run.curves if tag == "loss"))
    if not stages:
        return None
    figure, axes = panels(1, 3, height=2.9)
    for axis, (tag, title) in zip(
        axes[0], (("loss", "loss"), ("top1", "top-1 %"), ("lr", "learning rate")), strict=True
    ):
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


def accuracy(run: ReportedRun) -> Any:
    """A bar for every model and engine, with two standard deviations."""
    found = []
    for key, words in ROWS.items():
        section, _, part = key.partition(".")
        result = run.summary.get(section) or {}
        top1 = (result.get(part) or {} if part else result).get("top1")
        if top1 is not None:
            found.append((words, top1))
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


def clipping(run: ReportedRun) -> Any:
    """The share of values that each tensor clips, over the steps."""
    low, high = run.by_quantizer("clipped_low"), run.by_quantizer("clipped_high")
    both = {
        name: [(step, 100 * (a + b)) for (step, a), (_, b) in zip(low[name], high[name], strict=False)]
        for name in low
        if name in high
    }
    name = max(both, key=lambda name: both[name][-1][1], default="")
    return _over_time(both, f"values clipped, %; most at the end: {both[name][-1][1]:.2g} in {name}" if name else "", 5)


def levels(run: ReportedRun) -> Any:
    """The share of its integers that each tensor uses, over the steps."""
    found = run.by_quantizer("levels")
    return _over_time({k: [(s, 100 * v) for s, v in points] for k, points in found.items()}, "levels used, %", 100)


def _over_time(rows: dict[str, list[tuple[int, float]]], label: str, most: float) -> Any:
    if not rows:
        return None
    figure, axis = panel(1 + 0.09 * min(len(rows), 60))
    heat(figure, axis, rows, label, most)
    return figure


def oscillation(run: ReportedRun) -> Any:
    """The share of weights that turn round, by layer."""
    curves = run.by_quantizer("oscillating")
    if not curves:
        return None
    figure, axis = panel()
    most = sorted(curves, key=lambda name: -max(value for _, value in curves[name]))[:NAMED]
    for name, points in curves.items():
        named = {"color": COLOURS[most.index(name)], "label": name} if name in most else {"color": QUIET, "alpha": 0.35}
        steps, values = zip(*points, strict=True)
        axis.plot(steps, percent(values), **named)
    axis.set(xlabel="step", ylabel="% of a layer's weights", ylim=(0, None))
    axis.legend()
    return figure
