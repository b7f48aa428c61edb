"""The picture of `benchmark`."""

from pathlib import Path
from typing import Any

from qat.training.errors import UserError


def check_plot() -> None:
    """Refuse to draw, before anything is measured, where matplotlib is missing.

    Raises:
        UserError: saying so.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError("--plot: needs matplotlib; pip install matplotlib, or leave --plot out") from None


def draw_latencies(results: dict[str, Any], path: Path) -> None:
    """Milliseconds of a call by batch size, a bar for each model; one panel for each number of threads.

    Raises:
        UserError: for a format that matplotlib does not write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = results["rows"]
    threads, batches, models = (list(dict.fromkeys(row[key] for row in rows)) for key in ("threads", "batch", "model"))
    width = 0.8 / len(models)
    figure = Figure(figsize=(1.5 + 2.5 * len(threads), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, count in zip(figure.subplots(1, len(threads), squeeze=False)[0], threads, strict=True):
        for place, model in enumerate(models):
            heights = [
                row["milliseconds"] for batch in batches for row in rows
                if (row["threads"], row["batch"], row["model"]) == (count, batch, model)
            ]  # fmt: skip
            left = [index + place * width for index in range(len(batches))]
            bars = axes.bar(left, heights, width=0.95 * width, label=model)
            axes.bar_label(bars, fmt="%.1f", fontsize=7)
        axes.set_xticks(
            [index + 0.5 * width * (len(models) - 1) for index in range(len(batches))], [str(each) for each in batches]
        )
        axes.set(title=f"{count} thread{'s' * (count > 1)}", xlabel="images a call", ylabel="ms", yscale="log")
        axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UserError(f"--plot: '{path}': {str(error).splitlines()[0]}") from error
