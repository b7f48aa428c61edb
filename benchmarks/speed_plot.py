"""A picture of the kept results: time of a training step as a ratio to float, for every model and variant.

python -m benchmarks.speed_plot                  # benchmarks/results/speed.jsonl -> docs/speed.png
"""

import argparse
from pathlib import Path

from benchmarks.speed_rows import Row, comparison
from benchmarks.speed_table import CPU, PICTURE, rows_of
from benchmarks.speed_variants import TITLES

BAR = 0.8
"""Share of a model's place that its bars take."""

OWN = "#c0392b"
PEERS = ("#34495e", "#7f8c8d", "#95a5a6", "#bdc3c7", "#d5d8dc")


def bars(rows: list[Row]) -> tuple[list[str], dict[str, list[Row | None]]]:
    """The names of the comparisons, and for every variant its rows in that order; None where it did not run."""
    keys = list(dict.fromkeys(comparison(row) for row in rows))
    names = [next(f"{row['subject']}\nbatch {row['batch']}" for row in rows if comparison(row) == key) for key in keys]
    found = {(row["variant"], comparison(row)): row for row in rows if "missing" not in row}
    ran = {variant for variant, _ in found}
    variants = [variant for variant in TITLES if variant in ran and variant != "float"]
    return names, {variant: [found.get((variant, key)) for key in keys] for variant in variants}


def draw(rows: list[Row], path: Path) -> None:
    """Write the picture: a group of bars a comparison, the range over rounds as a line on each, float as a line at 1.

    Raises:
        ValueError: if there is nothing to draw.
    """
    names, variants = bars(rows)
    if not variants:
        raise ValueError(f"{path.name}: no training step is kept; run python -m benchmarks.speed --cases step")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.0 + 1.7 * len(names), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = BAR / len(variants)
    peers = iter(PEERS * len(variants))
    for number, (variant, own) in enumerate(variants.items()):
        there = [(place, row) for place, row in enumerate(own) if row is not None]
        ratios = [row["ratio"] for _, row in there]
        spread = [
            [row["ratio"] - row["low"] for _, row in there],
            [row["high"] - row["ratio"] for _, row in there],
        ]
        axes.bar(
            [place - BAR / 2 + (number + 0.5) * width for place, _ in there],
            ratios,
            width,
            yerr=spread,
            label=TITLES[variant],
            color=OWN if variant == "qat" else next(peers),
            error_kw={"elinewidth": 0.8, "capsize": 1.5},
        )
    axes.axhline(1.0, color="black", linewidth=1.0)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("training step, x float eager")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=len(variants), loc="outside upper center", fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=CPU)
    parser.add_argument("--to", type=Path, default=PICTURE)
    given = parser.parse_args()
    draw(rows_of("step", given.results), given.to)


if __name__ == "__main__":
    main()
