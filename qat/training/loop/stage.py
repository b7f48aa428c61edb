"""The inputs of one stage of training."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat.finetuning import Distillation
from qat.training.config.schema import RunConfig
from qat.training.config.stages import StageConfig
from qat.training.loop.aids import Mixing
from qat.training.loop.evaluation import Batches, TrainBatches
from qat.training.run.logging import RunLog


def steps_per_epoch(stage: StageConfig, train: TrainBatches) -> int:
    """Optimizer steps of the stage in one pass over the batches."""
    return math.ceil(len(train) / stage.accumulate)


@dataclass
class StageRun:
    """Everything that one stage of training needs.

    `first_step` counts the training steps of the run before it, so that curves join; `epochs_before` the epochs that it
    continues, so that no order of images repeats. `sample` has training images without augmentation, on which
    `settle_statistics` compares.
    """

    name: str
    stage: StageConfig
    config: RunConfig
    model: nn.Module
    train: TrainBatches
    val: Batches
    device: torch.device
    log: RunLog
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)
    first_step: int = 0
    epochs_before: int = 0
    keep_best: bool = True
    sample: Batches | None = None
    distillation: Distillation | None = None
    mixing: Mixing | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return steps_per_epoch(self.stage, self.train)

    @property
    def is_compiled(self) -> bool:
        """Whether steps run through torch.compile; `auto` leaves out aids that need the model itself."""
        if self.config.compile != "auto":
            return self.config.compile
        qat = self.config.qat
        looks_inside = qat.gradual is not None or bool(qat.distillation is not None and qat.distillation.features)
        return self.device.type == "cuda" and not looks_inside

    def step(self, epoch: int, number: int = 0) -> int:
        """Return the run's step count after `epoch` whole epochs of this stage and `number` steps."""
        return self.first_step + epoch * self.steps_per_epoch + number
