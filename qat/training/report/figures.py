"""Figures of a report: functions from a run to a figure, or None without data.

The page shows each function's docstring: the figure's title, and how a healthy one looks.
"""

import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from qat.contexts import warnings_ignored
from qat.training.report.findings import AT_FLOOR, SCORED, Points, ReportedRun
from qat.training.run.folder import DRAWN, SENSITIVITY
from qat.training.run.report import ROWS
from qat.training.tasks.known import score_of, task_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 5  # curves with a name of their own in a figure of many
MOVED = 0.01  # scales that have moved less have no name
# Foreground and background; in the SVG the page's own colours replace them, light or dark.
INK, FAINT = "#010203", "#d0d1d2"
# Visible on white and on black.
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#06b6d4", "#84cc16", "#ec4899", "#78716c")
SICK, QUIET = "#ef4444", "#94a3b8"
STYLE: Any = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.5,
    "axes.axisbelow": True, "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False, "lines.linewidth": 1.2, "svg.fonttype": "none",
    "figure.facecolor": "none", "axes.facecolor": "none", "figure.dpi": 120, "svg.hashsalt": "qat",
}  # fmt: skip

WIDTH = 7.2  # of a figure, in inches
METADATA, SIZE = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL), re.compile(r' (?:width|height)="[\d.]+pt"')


def can_draw() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def styled() -> Iterator[None]:
    """Let matplotlib draw in this style."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings_ignored(category=UserWarning):  # of letters that its font lacks
        yield


def panels(
    rows: int = 1, columns: int = 1, height: float = 2.6, sharey: bool = False
) -> "tuple[Figure, np.ndarray[Any, Any]]":
    """Return a figure and its axes as an array, each row of this height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)


def panel(height: float = 2.6) -> "tuple[Figure, Axes]":
    figure, axes = panels(height=height)
    return figure, axes[0][0]


def rendered(figure: "Figure") -> tuple[str, Image.Image]:
    """Return the figure as an SVG element for a page, and as a picture on white."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas: Any = figure.canvas  # of Agg, see `panels`
    canvas.draw()
    picture = Image.fromarray(np.array(canvas.buffer_rgba()))
    figure.set_layout_engine("none")  # the SVG keeps the layout of the picture, which took most of the time
    stream = io.StringIO()
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})  # type: ignore[no-untyped-call]
    text = METADATA.sub("", stream.getvalue()[stream.getvalue().index("<svg") :])
    text = SIZE.sub("", text, count=2).replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    return text, Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def name_axis(axes: "Axes", names: list[str]) -> None:
    """Write the names of bars below a figure, at most about 60 of them."""
    step = 1 + len(names) // 60
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=6)
    axes.set_xlim(-0.7, len(names) - 0.3)


def heat(figure: "Figure", axes: "Axes", rows: dict[str, Points], label: str, most: float) -> None:
    """Draw curves as rows of colours over their common steps."""
    steps = sorted({step for points in rows.values() for step, _ in points})
    values = np.full((len(rows), len(steps)), np.nan)
    for row, points in zip(values, rows.values(), strict=True):
        for step, value in points:
            row[steps.index(step)] = value
    edges = (np.arange(len(steps) + 1), np.arange(len(rows) + 1))
    picture = axes.pcolormesh(*edges, values, vmin=0, vmax=most, rasterized=True)
    axes.invert_yaxis()
    axes.grid(False)
    every = 1 + len(rows) // 55
    axes.set_yticks(np.arange(0, len(rows), every) + 0.5, list(rows)[::every], fontsize=5)
    shown = range(0, len(steps), 1 + len(steps) // 8)
    axes.set_xticks([each + 0.5 for each in shown], [str(steps[each]) for each in shown])
    axes.set(xlabel="step", title=label)
    figure.colorbar(picture, ax=axes, fraction=0.04, extend="max" if most < 100 else "neither")


def results(run: ReportedRun) -> "Figure | None":
    """All curves

    Healthy: QAT begins near where float ended, and its validation loss does not jump up.
    """
    stages = list(dict.fromkeys(name.partition("/")[0] for name, tag in run.curves if tag == "loss"))
    if not stages:
        return None
    figure, axes = panels(1, 3, height=2.9)
    task = task_in(run.summary.get("qat", {}))
    titles = {"loss": "loss", task.metric: f"{task.title} %", "lr": "learning rate"}
    for axis, (tag, title) in zip(axes[0], titles.items(), strict=True):
        for stage, colour in zip(stages, COLOURS, strict=False):
            for split, style in (("train", {"alpha": 0.45, "lw": 0.9}), ("val", {"marker": "o", "ms": 2.5})):
                if points := run.curves.get((f"{stage}/{split}", tag)):
                    axis.plot(*zip(*points, strict=True), color=colour, label=f"{stage} {split}", **style)
        axis.set(title=title, xlabel="step")
    exported = score_of(run.summary.get("onnx", {}))
    if exported is not None:
        axes[0][1].axhline(exported, color=QUIET, ls="--", label="integers")
    ends = [points[-1][1] for (_, tag), points in run.curves.items() if tag == task.metric] + [exported or 100]
    axes[0][1].set_ylim(max(0, min(ends) - 5), 101)  # without the beginning of float
    axes[0][0].set_yscale("log")
    axes[0][2].set(yscale="log", ylim=(max(axes[0][2].get_ylim()[1], 1e-12) * 1e-4, None))
    figure.legend(*axes[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def classes(run: ReportedRun) -> "Figure | None":
    """Each class

    Healthy: no class loses much more than the others, those with few images aside. The classes that lose most from
    float to QAT come first, at most 30.
    """
    if not (names := list(run.classes)[:30]):
        return None
    figure, axis = panel(1 + 0.3 * len(names))
    for number, key in enumerate(SCORED):
        scores = np.array([run.classes[name][number] for name in names], float)
        axis.barh(np.arange(len(names)) + 0.27 * (number - 1), scores, 0.27, label=ROWS[key], color=COLOURS[number])
    axis.set_yticks(range(len(names)), names)
    axis.set(xlabel=f"{task_in(run.summary['qat']).title.removeprefix('m')} %", ylim=(len(names) - 0.4, -0.6))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def pictures(run: ReportedRun) -> "Figure | None":
    """Truth and answers

    Healthy: QAT and its file answer as float does. Of the first 200 validation images, those on which float and QAT
    differ most; boxes with scores of at least 0.5, which differ without a partner of the class that overlaps by half.
    """
    found, file = run.analysis.get("pictures"), run.path / DRAWN
    if not found or not file.is_file():
        return None
    rows, columns = found["differing"], found["columns"]
    figure, axis = panel(WIDTH * len(rows) / len(columns))
    with Image.open(file) as drawn:
        axis.imshow(drawn, extent=(0, len(columns), len(rows), 0), interpolation="none")
    axis.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axis.set_yticks(np.arange(len(rows)) + 0.5, [f"{each:.3g}" for each in rows])
    axis.tick_params(length=0, labeltop=True, labelbottom=False, grid_alpha=0)
    axis.set(ylabel=found["unit"], frame_on=False)
    return figure


def errors(run: ReportedRun) -> "Figure | None":
    """Error by layer

    Healthy: 30 to 45 dB at 8 bits and about 6 less for each bit, bars of one height; a single low bar is the layer to
    blame, and the line falls slowly from input to output.
    """
    rows = run.analysis.get("layers")
    if not rows:
        return None
    figure, axis = panel(3.2)
    local = [np.nan if row["local"] is None else row["local"] for row in rows]
    axis.bar(range(len(rows)), local, color=COLOURS[0], alpha=0.6, label="this layer alone")
    axis.plot([row["cumulative"] for row in rows], color=COLOURS[1], marker="o", ms=2.5, label="all so far")
    name_axis(axis, [row["name"] for row in rows])
    axis.set(ylabel="SQNR, dB")
    axis.legend()
    return figure


def sensitivity(run: ReportedRun) -> "Figure | None":
    """Sensitivity

    Healthy: no layer alone costs more than the noise; one that does deserves more bits.
    """
    result = run.read(SENSITIVITY)
    if not result:
        return None
    layers, floor = result["layers"], result["float"]["loss"]
    figure, axis = panel(1 + 0.22 * len(layers))
    for number, part in enumerate(("weight", "activation")):
        rows = {place: row["only"][part]["loss"] - floor for place, row in enumerate(layers) if part in row["only"]}
        places = [place + 0.4 * number - 0.2 for place in rows]
        axis.barh(places, list(rows.values()), height=0.4, label=f"{part}s", color=COLOURS[number])
    axis.set_yticks(range(len(layers)), [row["name"] for row in layers])
    axis.set_ylim(len(layers) - 0.4, -0.6)
    weights = f"{result.get('weights', 'calibrated')} weights"
    axis.set(xlabel=f"loss above float, with only this quantized ({result['images']:,} images; {weights})")
    axis.legend()
    return figure


def scales(run: ReportedRun) -> "Figure | None":
    """Scales

    Healthy: lines leave 1 slowly and flatten out, within a factor of 2; jagged lines mean a rate that is too high, red
    ones at 1/32 have collapsed.
    """
    if not run.by_quantizer("scale"):
        return None
    figure, axes = panels(1, 2, sharey=True)
    for axis, role in zip(axes[0], ("weight", "activation"), strict=True):
        curves, resting = run.by_quantizer("scale", role), run.by_quantizer("at_floor", role)
        floor = {name for name, points in resting.items() if points[-1][1] > AT_FLOOR}
        moved = {name: abs(math.log(max(points[-1][1], 1e-6))) for name, points in curves.items()}
        far = sorted((name for name in moved if moved[name] > MOVED), key=lambda name: -moved[name])[:NAMED]
        started = {  # at 1, the scale of calibration
            name: [(points[0][0] - 1, 1.0), *((step, max(value, 1 / 64)) for step, value in points)]
            for name, points in curves.items()
        }
        _lines(axis, started, [name for name in far if name not in floor], sorted(floor))
        axis.set(yscale="log", xlabel="step", title=f"scales of {role}s, 1 at the start")
        if floor:
            axis.axhline(1 / 32, color=SICK, ls=":", lw=0.8)
    low, high = axes[0][0].get_ylim()
    axes[0][0].set_ylim(low if low < 0.3 else 0.5, max(high, 2))
    ticks = [each for each in (1 / 32, 0.1, 0.5, 1, 2, 10, 100) if low / 2 <= each <= 2 * high]
    axes[0][0].set_yticks(ticks, [f"{each:.2g}" for each in ticks])
    axes[0][0].minorticks_off()
    return figure


def _lines(axis: "Axes", curves: dict[str, Points], named: list[str], sick: list[str]) -> None:
    style: dict[str, Any] = {
        name: {"color": colour, "label": name} for name, colour in zip(named, COLOURS, strict=False)
    }
    style |= {name: {"color": SICK, "label": name if name in sick[:NAMED] else None} for name in sick}
    for name, points in curves.items():
        axis.plot(*zip(*points, strict=True), **style.get(name, {"color": QUIET, "alpha": 0.35}))
    if style:
        axis.legend(loc="best")


def clipping(run: ReportedRun) -> "Figure | None":
    """Clipped values and levels used

    Healthy: little is clipped, near 0 at 8 bits, a few percent at 4 and fewer, and most levels are used; what clips
    much has a range that is too narrow, what uses few levels wastes its bits on outliers or is nearly constant.
    """
    low, high = run.by_quantizer("clipped_low"), run.by_quantizer("clipped_high")
    clipped = {
        name: [(step, 100 * (a + b)) for (step, a), (_, b) in zip(low[name], high[name], strict=False)]
        for name in low.keys() & high.keys()
    }
    used = {
        name: [(step, 100 * share) for step, share in points] for name, points in run.by_quantizer("levels").items()
    }
    if not clipped or not used:
        return None
    figure, axes = panels(1, 2, height=1 + 0.09 * min(len(used), 60))
    heat(figure, axes[0][0], {name: clipped[name] for name in low if name in clipped}, "values clipped, %", 5)
    heat(figure, axes[0][1], used, "levels used, %", 100)
    return figure


def oscillation(run: ReportedRun) -> "Figure | None":
    """Weights that turn round

    Healthy: near 0 at the end, as the learning rate is; a line that stays up is a layer whose weights jump between two
    integers, which is common below 4 bits.
    """
    found = run.by_quantizer("oscillating").items()
    curves = {name: [(step, 100 * share) for step, share in points] for name, points in found}
    if not curves:
        return None
    figure, axis = panel()
    _lines(axis, curves, sorted(curves, key=lambda name: -max(value for _, value in curves[name]))[:NAMED], [])
    axis.set(xlabel="step", ylabel="% of a layer's weights", ylim=(0, None))
    return figure


_ALL = (results, classes, pictures, errors, sensitivity, scales, clipping, oscillation)

# By the names of their functions, which name their pictures and sections of the page too.
FIGURES: dict[str, Callable[[ReportedRun], "Figure | None"]] = {each.__name__: each for each in _ALL}
