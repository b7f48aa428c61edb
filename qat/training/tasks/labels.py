"""Classification and segmentation: one label for each image, or for each pixel."""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.training.errors import UserError
from qat.training.tasks.task import Kind, Score, Task

IGNORED = 255
"""Value of pixels in masks that neither loss nor score counts: PASCAL VOC's borders."""


class Classification(Task):
    """One label for each image."""

    name, builders = "classification", "torchvision.models"
    kind: ClassVar[Kind] = "labels"
    metric = title = train_metric = "top1"
    dims: ClassVar[int] = 2  # of the logits
    auxiliary_weight: ClassVar[float] = 0.3  # of the loss of each auxiliary classifier; GoogLeNet's (arXiv:1409.4842)

    def answers(self, output: object, images: Tensor) -> Tensor:
        """Return a model's logits.

        The output is a tensor, a dict with the key logits or out, or a tuple or list, whose `.logits` or first entry is
        used.
        """
        logits = output
        if isinstance(output, Mapping):
            logits = output.get("logits", output.get("out"))
        elif isinstance(output, tuple | list) and output:
            logits = getattr(output, "logits", output[0])
        if not isinstance(logits, Tensor) or logits.dim() != self.dims or len(logits) != len(images):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            form = ", ".join([str(len(images)), "classes", "height", "width"][: self.dims])
            raise UserError(f"model: it must return logits of shape ({form}), but returned {got}")
        return logits

    def training_loss(self, output: object, images: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of a batch and the logits; labels may be shares of classes (N, classes).

        Other tensors of the logits' shape in the output are of auxiliary classifiers (GoogLeNet, Inception v3, FCN and
        DeepLab in training), whose losses are added.
        """
        chosen = self.answers(output, images)
        logits = chosen.float()
        if labels.dim() == 2:  # mixed labels; the model may have more outputs than the data have classes
            labels = F.pad(labels, (0, logits.shape[1] - labels.shape[1]))
        loss = self.loss(logits, labels, smoothing)
        several = list(output.values()) if isinstance(output, Mapping) else output
        if isinstance(several, tuple | list):
            for side in [x for x in several if isinstance(x, Tensor) and x is not chosen and x.shape == logits.shape]:
                loss = loss + self.auxiliary_weight * self.loss(side.float(), labels, smoothing)
        return loss, logits

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)

    def total_loss(self, answers: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(answers, labels, reduction="sum")

    def correct(self, answers: Tensor, labels: Tensor) -> Tensor:
        truth = labels if labels.dim() == 1 else labels.argmax(dim=1)  # of mixed labels the stronger
        return (answers.argmax(dim=1) == truth).sum()

    def classes(self, answers: Tensor) -> Tensor:
        return answers.argmax(dim=1)

    def class_count(self, answers: Tensor) -> int:
        return answers.shape[1]

    def counts(self, answers: Tensor, labels: Tensor) -> Tensor:
        """Count right answers, answers and truths of each class: int64 (3, classes)."""
        found = torch.zeros(3, answers.shape[1], dtype=torch.int64, device=answers.device)
        counted = (labels != IGNORED).long() if self.dims > 2 else torch.ones_like(labels)
        chosen, truths = answers.argmax(dim=1), labels * counted  # an ignored pixel adds 0 to class 0
        for row, classes, ones in zip(
            found, (truths, chosen, truths), (counted * (chosen == truths), counted, counted), strict=True
        ):
            row.scatter_add_(0, classes.flatten(), ones.flatten())
        return found

    def merged(self, counts: list[Tensor]) -> Tensor:
        return torch.stack(counts).sum(0)

    def score(self, counts: Tensor) -> Score:
        """Return top-1 accuracy."""
        right, _, truths = counts.double()
        return Score(float(100 * right.sum() / truths.sum()), float(100 * truths.max() / truths.sum()))


class Segmentation(Classification):
    """One label for each pixel."""

    name, builders = "segmentation", "torchvision.models.segmentation"
    kind: ClassVar[Kind] = "masks"
    metric, title, train_metric = "miou", "mIoU", "pixels"
    builder_arguments: ClassVar = {"weights_backbone": None}  # which would be downloaded unasked
    dims, auxiliary_weight = 4, 0.5  # of torchvision's own training

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        total = F.cross_entropy(logits, labels, label_smoothing=smoothing, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)  # torch's mean of no pixel is NaN

    def total_loss(self, answers: Tensor, labels: Tensor) -> Tensor:
        return self.loss(answers, labels) * len(labels)

    def correct(self, answers: Tensor, labels: Tensor) -> Tensor:
        counted = labels != IGNORED
        right = ((answers.argmax(dim=1) == labels) & counted).sum()
        return right * len(labels) / counted.sum().clamp(min=1)

    def score(self, counts: Tensor) -> Score:
        """Return the mean of intersection over union, and that of each class."""
        right, chosen, truths = counts.double()
        each = 100 * right / (chosen + truths - right)
        chance = truths.max() / truths.sum() / (truths > 0).sum()
        return Score(float(each[chosen + truths > 0].mean()), float(100 * chance), tuple(each.tolist()))
