"""The teacher of a stage: the run's float model, or another that the config names."""

import copy
from pathlib import Path

import torch
from torch import nn

from qat.contexts import evaluating
from qat.finetuning import Distillation
from qat.finetuning.distillation import LOGITS
from qat.training.config.imports import reason
from qat.training.config.schema import RunConfig
from qat.training.config.stages import ModelConfig, QATStageConfig, StageConfig
from qat.training.errors import UserError, problems_of
from qat.training.model.building import build_model
from qat.training.model.weights import load_weights


def build_distillation(
    config: RunConfig, stage: StageConfig, classes: int, float_weights: Path, device: torch.device
) -> Distillation | None:
    """What the stage learns from besides labels, on the device; None if its config names nothing."""
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


def check_distillation(
    config: RunConfig,
    model: nn.Module,
    prepared: nn.Module,
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    with_weights: bool = True,
) -> None:
    """Learn once from a copy of the teacher, so that what is wrong with it shows before any training."""
    wanted = config.qat.distillation
    if wanted is None:
        return
    teacher = copy.deepcopy(model) if wanted.teacher is None else _other(wanted.teacher, classes, with_weights)
    student, images = copy.deepcopy(model), torch.zeros(2, *image_shape)
    try:
        with torch.no_grad(), evaluating(student):
            distillation = Distillation(teacher, features=wanted.features)
            distillation.watching(prepared)
            output = distillation.watching(student)(images)
            if isinstance(output[LOGITS] if wanted.features else output, torch.Tensor):
                distillation(output, images)
    except Exception as error:  # user code, a teacher of other images, or features that do not compare
        raise UserError(f"qat.distillation: the teacher does not fit the model ({reason(error)})") from error


def _other(config: ModelConfig, classes: int, with_weights: bool = True) -> nn.Module:
    """Another teacher. A torchvision model needs weights to teach anything; a callable may have brought its own."""
    if ":" not in config.name and config.weights is None and config.checkpoint is None:
        raise UserError(
            f"qat.distillation.teacher: {config.name} has no weights; set checkpoint or weights of it, or leave teacher"
            " out to learn from the run's float model"
        )
    with problems_of("qat.distillation.teacher"):
        return build_model(config, classes, with_weights=with_weights)
