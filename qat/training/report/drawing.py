"""How figures look and are saved: as SVG that takes the page's colours, and as PNG."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from qat.contexts import warnings_ignored

INK, FAINT = "#010203", "#d0d1d2"
"""Lines and text, and what lies behind; the SVG takes the page's own colours for them, light or dark."""

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#06b6d4", "#84cc16", "#ec4899", "#78716c")
"""Seen on white and on black."""

SICK, QUIET = "#ef4444", "#94a3b8"

STYLE: dict[str, Any] = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT, "grid.linewidth": 0.5,
    "axes.axisbelow": True, "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False, "lines.linewidth": 1.2, "svg.fonttype": "none",
    "figure.facecolor": "none", "axes.facecolor": "none", "figure.dpi": 120, "svg.hashsalt": "qat",
}  # fmt: skip

WIDTH = 7.2  # of a figure, in inches
METADATA, SIZE = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL), re.compile(r' (?:width|height)="[\d.]+pt"')


def can_draw() -> bool:
    """Whether matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def styled() -> Iterator[None]:
    """A context in which matplotlib draws in this style."""
    import matplotlib

    style: Any = STYLE
    with matplotlib.rc_context(style), warnings_ignored(category=UserWarning):  # letters that its font lacks
        yield


def panels(rows: int = 1, columns: int = 1, height: float = 2.6, **options: Any) -> tuple[Any, Any]:
    """A figure of so many axes, each row of this height in inches, and the axes as an array."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panel(height: float = 2.6) -> tuple[Any, Any]:
    """A figure of one axis, and the axis."""
    figure, axes = panels(height=height)
    return figure, axes[0][0]


def rendered(figure: Any) -> tuple[str, Image.Image]:
    """The figure as an SVG element for a page, and as a picture on white, each drawn and laid out once."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.canvas.draw()
    picture = Image.fromarray(np.array(figure.canvas.buffer_rgba()))
    figure.set_layout_engine("none")
    stream, canvas = io.StringIO(), FigureCanvasSVG(figure)
    canvas.print_svg(stream, metadata={"Date": None})  # type: ignore[no-untyped-call]
    text = METADATA.sub("", stream.getvalue()[stream.getvalue().index("<svg") :])
    text = SIZE.sub("", text, count=2).replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    return text, Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def name_axis(axes: Any, names: list[str], most: int = 60) -> None:
    """Names below a figure with a bar for each; of many, some."""
    step = 1 + len(names) // most
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=6)
    axes.set_xlim(-0.7, len(names) - 0.3)


def heat(figure: Any, axes: Any, rows: dict[str, list[tuple[int, float]]], label: str, most: float) -> None:
    """Curves as rows of colours, one for each tensor, over the steps that all share."""
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
