"""The teacher of a stage: the run's float model, or another that the config names."""

from pathlib import Path

import torch
from torch import nn

from qat.finetuning import Distillation
from qat.training.config.schema import RunConfig
from qat.training.config.stages import ModelConfig, QATStageConfig, StageConfig
from qat.training.errors import UserError
from qat.training.run.models import build_model
from qat.training.run.weights import load_weights


def build_distillation(
    config: RunConfig, stage: StageConfig, classes: int, float_weights: Path, device: torch.device
) -> Distillation | None:
    """What the stage learns from besides labels, on the device; None if its config names nothing.

    Raises:
        UserError: if the teacher cannot be built, or its weights do not fit.
    """
    wanted = stage.distillation if isinstance(stage, QATStageConfig) else None
    if wanted is None:
        return None
    if wanted.teacher is None:
        teacher = build_model(config.model, classes, with_weights=False)
        load_weights(teacher, str(float_weights), config.model.name, "float weights")
    else:
        teacher = _other(wanted.teacher, classes)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    teacher.to(device).to(memory_format=layout)
    teacher.requires_grad_(False)
    amp = None if wanted.amp == "none" else torch.bfloat16
    return Distillation(
        teacher, temperature=wanted.temperature, weight=wanted.weight, amp=amp, features=wanted.features
    )


def check_teacher(config: RunConfig, classes: int) -> None:
    """Build the teacher that the config names, if it does: what is wrong with it shows before any training.

    Raises:
        UserError: as `build_distillation`.
    """
    if config.qat.distillation is not None and config.qat.distillation.teacher is not None:
        _other(config.qat.distillation.teacher, classes)


def _other(config: ModelConfig, classes: int) -> nn.Module:
    try:
        return build_model(config, classes)
    except UserError as error:
        raise UserError(*(f"qat.distillation.teacher: {problem}" for problem in error.problems)) from error
