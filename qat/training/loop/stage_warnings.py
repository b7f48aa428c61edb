"""Warnings about a stage that learned nothing or lost accuracy, because such a run still exits with status 0."""

import math

from qat.training.config.stages import StageConfig
from qat.training.loop.evaluation import Evaluation

SIGMAS = 2.0
"""Differences count from this many standard deviations on, given the size of the validation split."""


def warnings_about(name: str, key: str, stage: StageConfig, evaluation: Evaluation, start: float | None) -> list[str]:
    """Return a warning if the result of a stage is at chance level, or worse than the stage's starting model.

    Chance level is the share of the most common label, which a constant prediction reaches. A result is above chance if
    it exceeds it by two standard deviations of a share among that many images. If even a perfect result would not, the
    split is too small to tell and there is no warning, unless all its images are of one class. `start` is top1 on the
    same images before the stage, None if there was no trained model, and `key` that of its learning rate.
    """
    best_constant, count = evaluation.most_common / 100.0, evaluation.count
    margin = 100.0 * SIGMAS * math.sqrt(best_constant * (1.0 - best_constant) / count)
    advice = f"; try a lower {key} (now {stage.lr:g}) or more epochs" if stage.epochs else ""
    warnings = []
    if evaluation.most_common == 100.0:
        warnings.append(f"{name}: all {count} validation images are of one class, so val top1 says nothing")
    elif evaluation.top1 <= evaluation.most_common + margin < 100.0:
        warnings.append(
            f"{name}: val top1 {evaluation.top1:.2f} % is at chance level: the same answer for all {count} images"
            f" gives {evaluation.most_common:.2f} %{advice}"
        )
    elif start is not None:
        share = (start + evaluation.top1) / 200.0
        margin = 100.0 * SIGMAS * math.sqrt(2.0 * share * (1.0 - share) / count)
        if evaluation.top1 < start - margin:
            warnings.append(
                f"{name}: val top1 {evaluation.top1:.2f} % is below the {start:.2f} % that it started from{advice}"
            )
    return warnings
