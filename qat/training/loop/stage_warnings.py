"""Whether a stage has got anywhere: a run that trained to nothing ends well for the machine, and not for its reader."""

import math

from qat.training.config.schema import StageConfig
from qat.training.loop.evaluation import Evaluation

SIGMAS = 2.0
"""A difference of so many standard deviations of the validation split's own chance is one."""


def warnings_about(name: str, stage: StageConfig, evaluation: Evaluation, start: float | None) -> list[str]:
    """Say it where the result of a stage is at chance level, or worse than what the stage started from.

    Chance level is the share of the most common label, which a model reaches that looks at nothing. A result is above
    it if it is so by two standard deviations of a share of that many images; where even a perfect one would not be,
    the split is too small to tell and nothing is said.

    Args:
        name: of the stage.
        stage: how it was optimised.
        evaluation: of the model as the stage leaves it.
        start: top1 before the stage, of the same images; None if there was no model to speak of.
    """
    best_constant, count = evaluation.most_common / 100.0, evaluation.count
    margin = 100.0 * SIGMAS * math.sqrt(best_constant * (1.0 - best_constant) / count)
    section = "float" if name == "float" else "qat"
    advice = f"; try a lower {section}.lr (now {stage.lr:g}) or more epochs" if stage.epochs else ""
    warnings = []
    if evaluation.top1 <= evaluation.most_common + margin < 100.0:
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
