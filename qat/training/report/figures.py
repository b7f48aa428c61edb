"""Every figure of a report: its name, its title, and how a healthy one looks."""

from collections.abc import Callable
from typing import Any, NamedTuple

from qat.training.report import model_figures as of_model
from qat.training.report import training_figures as of_training
from qat.training.report.run import ReportedRun


class Shown(NamedTuple):
    """A figure of the report; `draw` returns None where the run has nothing for it."""

    title: str
    healthy: str
    draw: Callable[[ReportedRun], Any]


FIGURES = {
    "results": Shown(
        "All curves",
        "Healthy: QAT begins near where float ended, and its validation loss does not jump up.",
        of_training.results,
    ),
    "accuracy": Shown(
        "Accuracy",
        "Healthy: QAT and every engine lie within the error bars of float; calibration alone may lie below, and with"
        " few bits far below.",
        of_training.accuracy,
    ),
    "errors": Shown(
        "Error by layer",
        "Healthy: 30 to 45 dB at 8 bits and about 6 less for each bit, bars of one height; a single low bar is the"
        " layer to blame, and the line falls slowly from input to output.",
        of_model.errors,
    ),
    "sensitivity": Shown(
        "Sensitivity",
        "Healthy: no layer alone costs more than the noise; one that does deserves more bits.",
        of_model.sensitivity,
    ),
    "scales": Shown(
        "Scales",
        "Healthy: lines leave 1 slowly and flatten out, within a factor of 2; jagged lines mean a rate that is too"
        " high, red ones at 1/32 have collapsed.",
        of_training.scales,
    ),
    "clipping": Shown(
        "Clipped values",
        "Healthy: near 0 at 8 bits, a few percent at 4 and fewer; a row that lights up has a range that is too narrow.",
        of_training.clipping,
    ),
    "levels": Shown(
        "Levels used",
        "Healthy: most rows are light; a dark row wastes its bits on outliers, or its tensor is nearly constant.",
        of_training.levels,
    ),
    "oscillation": Shown(
        "Weights that turn round",
        "Healthy: near 0 at the end, as the learning rate is; a line that stays up is a layer whose weights jump"
        " between two integers, which is common below 4 bits.",
        of_training.oscillation,
    ),
    "histograms": Shown(
        "The six worst layers on their grids",
        "Healthy: the values (blue; orange: before QAT) fill the grid (green), little lies outside; peaks"
        " at the ends of a weight are the largest value of each channel.",
        of_model.histograms,
    ),
    "batch_norm": Shown(
        "BatchNorm: running statistics against batches",
        "Healthy: all bars below 0.1; above 0.25 evaluation normalises otherwise than training did.",
        of_model.batch_norm,
    ),
    "confusion": Shown(
        "Answers that changed",
        "Healthy: few, and scattered; a whole column in red is a class that now wins where it should not.",
        of_model.confusion,
    ),
    "lost": Shown(
        "Images whose right answer was lost",
        "Healthy: few, and hard ones; the float model named them rightly (first line), the integers do not (second).",
        of_model.lost,
    ),
    "integers": Shown(
        "Integers that differ",
        "Healthy: none, or some in a million, which are near-ties; red ones are no ties: the file is another function.",
        of_model.integers,
    ),
    "costs": Shown(
        "Cost by layer",
        "To read: bits saved where the bars are high matter; a layer in float stands out.",
        of_model.costs,
    ),
    "latency": Shown(
        "Latency", "Healthy: integers take less time than float on the device that counts.", of_model.latency
    ),
}
