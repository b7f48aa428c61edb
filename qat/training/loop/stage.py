"""What one stage of training works with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat.training.config.schema import RunConfig, StageConfig
from qat.training.loop.evaluation import Batches, TrainBatches
from qat.training.run.logging import RunLog


@dataclass
class StageRun:
    """Everything that one stage of training works with.

    Args:
        name: of the stage; groups its curves and goes into the checkpoints.
        stage: how it is optimised.
        config: the whole run's config: amp, channels_last, log_every; saved in the checkpoints.
        model: moved to the device and trained in place.
        train, val: the batches.
        device: from `pick_device`.
        log: open; gets the curves and one line an epoch.
        folder: where last.pt and best.pt go.
        results: plain values (or tensors) of earlier stages, saved in the checkpoints.
        first_step: training steps of the run before this stage, so that the curves of the stages join.
        keep_best: whether to write best.pt: the weights of the stage's best epoch, as evaluated.
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
    keep_best: bool = True

    def step(self, epoch: int, number: int = 0) -> int:
        """The run's count of steps after `epoch` whole epochs of this stage and `number` steps."""
        return self.first_step + epoch * len(self.train) + number
