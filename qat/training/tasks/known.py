"""Tasks by the model's name, and by what a result holds."""

import functools
from collections.abc import Mapping
from typing import Any

from qat.training.tasks.detection import Detection
from qat.training.tasks.labels import Classification, Segmentation
from qat.training.tasks.task import Task

CLASSIFICATION, SEGMENTATION, DETECTION = TASKS = (Classification(), Segmentation(), Detection())


@functools.cache
def task_of(name: str, given: str | None) -> Task:
    """Return the task of a model: `model.task`, else that of torchvision's builder; of others, classification."""
    if given is not None:
        return next(task for task in TASKS if task.name == given)
    if ":" in name or "/" in name:
        return CLASSIFICATION
    return next((task for task in TASKS if name in task.models()), CLASSIFICATION)


def task_in(result: Mapping[str, Any]) -> Task:
    """Return the task whose score a result of a stage holds; classification if it holds none."""
    return next((task for task in TASKS if task.metric in result), CLASSIFICATION)


def score_of(result: Mapping[str, Any]) -> float | None:
    """Return the score of a result of a stage, in percent."""
    return result.get(task_in(result).metric)
