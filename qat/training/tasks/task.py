"""`Task`: what a run learns, and all that depends on it."""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from torch import Tensor, nn

Kind: TypeAlias = Literal["labels", "masks", "boxes"]
"""What a data set says of an image: its class, a class for each pixel, or boxes with classes."""


@dataclass(frozen=True)
class Score:
    """Score of counted answers, in percent."""

    value: float
    chance: float  # of the same answer for everything
    by_class: tuple[float, ...] = ()  # NaN for a class that is nowhere


class Task(ABC):
    """Losses, counts and scores of what a run learns.

    Answers are what a model's output says: logits, or a dict of a detector's tensors. Labels are int64 (N,), int64
    masks (N, H, W), or float32 boxes (N, M, 6): label, x1, y1, x2, y2, crowd, in rows that the label -1 pads.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    builders: ClassVar[str]  # torchvision's module of its models
    metric: ClassVar[str]  # key of its score in summary.json and in the curves
    title: ClassVar[str]  # of the score, in tables
    train_metric: ClassVar[str | None]  # key of the share of right answers in training mode
    builder_arguments: ClassVar[dict[str, Any]] = {}
    has_classes: ClassVar[bool] = True  # along axis 1 of the outputs; else every value counts by itself

    def models(self) -> list[str]:
        """Return the names of torchvision's builders for this task."""
        import torchvision  # late, since it takes seconds

        return list(torchvision.models.list_models(module=importlib.import_module(self.builders)))

    def network(self, model: nn.Module) -> nn.Module:
        """Return the part of a model that is quantized, trained and exported."""
        return model

    def bound(self, model: nn.Module) -> "Task":
        """Return the task with what it needs to know of a network, or a quantized one."""
        return self

    @abstractmethod
    def answers(self, output: object, images: Tensor) -> Any:
        """Return the answers in the output for a batch of images; UserError for another form."""

    @abstractmethod
    def training_loss(self, output: object, images: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Any]:
        """Return the mean loss of a batch in training, and the answers."""

    @abstractmethod
    def total_loss(self, answers: Any, labels: Tensor) -> Tensor:
        """Return the sum of the images' losses."""

    @abstractmethod
    def correct(self, answers: Any, labels: Tensor) -> Tensor:
        """Return how many images are right, or the shares of them that are."""

    @abstractmethod
    def classes(self, answers: Any) -> Tensor:
        """Return the class of each answer."""

    @abstractmethod
    def class_count(self, answers: Any) -> int:
        """Return how many classes the answers tell apart."""

    @abstractmethod
    def counts(self, answers: Any, labels: Tensor) -> Tensor:
        """Count answers, for `score`."""

    @abstractmethod
    def merged(self, counts: list[Tensor]) -> Tensor:
        """Return the counts of several batches as those of one."""

    @abstractmethod
    def score(self, counts: Tensor) -> Score:
        """Return the score of all counts."""
