"""Tasks that a run can learn: the builders that are for it, its loss, and its score."""

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.training.errors import UserError

Kind: TypeAlias = Literal["labels", "masks", "boxes"]
"""What a data set says of each image: a class, a class for each pixel, or objects, each a class and a box."""

IGNORED = 255
"""Value of pixels in masks that neither loss nor score counts: PASCAL VOC's borders."""


@dataclass(frozen=True)
class Task:
    """What a run learns: one label for each image, or for each pixel."""

    name: str
    builders: str  # torchvision's module of its models
    metric: str  # key of its score in summary.json and in the curves
    title: str  # of the score, in tables
    train_metric: str  # key of the share of right answers in training mode
    dims: int  # of the logits
    auxiliary_weight: float  # of the loss of each auxiliary classifier

    def models(self) -> list[str]:
        """Return the names of torchvision's builders for this task."""
        import torchvision  # late, since it takes seconds

        return list(torchvision.models.list_models(module=importlib.import_module(self.builders)))

    def split_output(self, output: object, batch_size: int) -> tuple[Tensor, list[Tensor]]:
        """Split a model's output into its logits and those of auxiliary classifiers.

        The output is a tensor, a dict with the key logits or out, or a tuple or list, whose `.logits` or first entry is
        used. Other tensors of the same shape are auxiliary logits (GoogLeNet and Inception v3 in training, FCN and
        DeepLab).
        """
        logits = output
        others: list[object] = []
        if isinstance(output, Mapping):
            logits, others = output.get("logits", output.get("out")), list(output.values())
        elif isinstance(output, tuple | list) and output:
            logits, others = getattr(output, "logits", output[0]), list(output)
        if not isinstance(logits, Tensor) or logits.dim() != self.dims or logits.shape[0] != batch_size:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            form = ", ".join([str(batch_size), "classes", "height", "width"][: self.dims])
            raise UserError(f"model: it must return logits of shape ({form}), but returned {got}")
        return logits, [x for x in others if isinstance(x, Tensor) and x is not logits and x.shape == logits.shape]

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean cross-entropy of a batch; labels may be shares of classes (N, classes)."""
        if self.dims == 2:
            return F.cross_entropy(logits, labels, label_smoothing=smoothing)
        total = F.cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)  # torch's mean of no pixel is NaN

    def total_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the images' losses."""
        if self.dims == 2:
            return F.cross_entropy(logits, labels, reduction="sum")
        return self.loss(logits, labels) * len(labels)

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return how many images are right; of masks, the share of right pixels times the images."""
        if self.dims == 2:
            truth = labels if labels.dim() == 1 else labels.argmax(dim=1)  # of mixed labels the stronger
            return (logits.argmax(dim=1) == truth).sum()
        counted = labels != IGNORED
        right = ((logits.argmax(dim=1) == labels) & counted).sum()
        return right * len(labels) / counted.sum().clamp(min=1)

    def counts(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count right answers, answers and truths of each class: int64 (3, classes)."""
        answers = logits.argmax(dim=1)
        found = torch.zeros(3, logits.shape[1], dtype=torch.int64, device=logits.device)
        counted = torch.ones_like(labels) if self.dims == 2 else (labels != IGNORED).long()
        truths = labels * counted  # an ignored pixel adds 0 to class 0
        for row, classes, ones in zip(
            found, (truths, answers, truths), (counted * (answers == truths), counted, counted), strict=True
        ):
            row.scatter_add_(0, classes.flatten(), ones.flatten())
        return found

    def score(self, counts: Tensor) -> float:
        """Return top-1 accuracy, or the mean of intersection over union, in percent."""
        right, answers, truths = counts.double()
        if self.dims == 2:
            return float(100 * right.sum() / truths.sum())
        return float(100 * self.by_class(counts)[answers + truths > 0].mean())

    def by_class(self, counts: Tensor) -> Tensor:
        """Return the intersection over union of each class; NaN for one that is nowhere."""
        right, answers, truths = counts.double()
        shares: Tensor = right / (answers + truths - right)
        return shares

    def chance(self, counts: Tensor) -> float:
        """Return the score of the same answer, the most common label, everywhere."""
        truths = counts[2].double()
        best, total = truths.max(), truths.sum()
        return float(100 * best / total / (1 if self.dims == 2 else (truths > 0).sum()))


CLASSIFICATION = Task("classification", "torchvision.models", "top1", "top1", "top1", 2, 0.3)
"""One label for each image. 0.3 is GoogLeNet's (arXiv:1409.4842)."""

SEGMENTATION = Task("segmentation", "torchvision.models.segmentation", "miou", "mIoU", "pixels", 4, 0.5)
"""One label for each pixel. 0.5 is that of torchvision's own training."""

TASKS = (CLASSIFICATION, SEGMENTATION)


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
