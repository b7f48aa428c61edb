"""Hooks around the steps of a stage: those of rules, and aids of `qat.finetuning`."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.contexts import evaluating
from qat.finetuning import Distillation, Oscillations, QuantNoise
from qat.finetuning.distillation import LOGITS
from qat.finetuning.ewgs import update_ewgs
from qat.quantizer import Quantizer
from qat.training.config.imports import reason
from qat.training.config.schema import RunConfig
from qat.training.config.stages import ModelConfig, QATStageConfig, StageConfig
from qat.training.data.loaders import Data
from qat.training.errors import UserError, problems_of, value_errors_reported
from qat.training.loop.stage import Batch, Mixing, TrainBatches
from qat.training.model import build_model, load_float_weights
from qat.training.run.folder import State
from qat.training.run.logging import OF_QUANTIZERS, RunLog


def build_mixing(stage: StageConfig, classes: int) -> Mixing | None:
    """Return mixup, cutmix, or one of the two for each batch; None if neither is on."""
    if not (stage.mixup_alpha or stage.cutmix_alpha):
        return None
    from torchvision.transforms import v2  # late, since it takes seconds

    wanted = ((v2.MixUp, stage.mixup_alpha), (v2.CutMix, stage.cutmix_alpha))
    mixing: Mixing = v2.RandomChoice([kind(alpha=alpha, num_classes=classes) for kind, alpha in wanted if alpha])
    return mixing


class Aids:
    """Hooks of quantizers, and aids of a stage; steps call `student` for the model."""

    def __init__(
        self, model: nn.Module, stage: StageConfig | None = None, distillation: Distillation | None = None
    ) -> None:
        self.model, self.progress, self.distillation = model, 0.0, distillation
        self.student = model if distillation is None else distillation.watching(model)
        quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
        self.oscillations: Oscillations | None = None
        self.quant_noise: QuantNoise | None = None
        if isinstance(stage, QATStageConfig):
            if stage.oscillation is not None:
                with value_errors_reported("qat.oscillation: "):
                    self.oscillations = Oscillations(model, **stage.oscillation.model_dump())
            if stage.quant_noise is not None and quantizers:  # `float_finetune` has QAT's settings, and no quantizers
                with value_errors_reported("qat.quant_noise: "):
                    self.quant_noise = QuantNoise(model, **stage.quant_noise.model_dump())
        self.annealed = [q for q in quantizers if type(q).set_progress is not Quantizer.set_progress]
        self.penalised = [q for q in quantizers if type(q).penalty is not Quantizer.penalty]
        self.curved = any(q.spec.ewgs == "hessian" for q in quantizers)

    def before_epoch(self, loss_of: Callable[[Batch], Tensor], batches: TrainBatches) -> None:
        """Update delta from the first batch, if a quantizer has ewgs="hessian"."""
        if self.curved:
            with value_errors_reported("quantization: "):
                update_ewgs(self.model, lambda _model, batch: loss_of(batch), [next(iter(batches))])

    def before_step(self, progress: float) -> None:
        """Tell the annealed rules and the aids the training progress, 0 to 1."""
        self.progress = progress
        for quantizer in self.annealed:
            quantizer.set_progress(progress)
        if self.quant_noise is not None:
            self.quant_noise.set_progress(progress)

    def before_evaluation(self) -> None:
        """Quantize all of the model after the training steps of an epoch."""
        if self.quant_noise is not None:
            self.quant_noise.complete()

    def added(self, output: Any, images: Tensor) -> dict[str, Tensor]:
        """Return penalties of rules and losses of aids, by the names of their curves."""
        added = {}
        penalties = [penalty for each in self.penalised if (penalty := each.penalty()) is not None]
        if penalties:
            added["penalty_loss"] = sum(penalties[1:], start=penalties[0])
        if self.distillation is not None:
            added["distillation_loss"] = self.distillation(output, images)
        if self.oscillations is not None and self.oscillations.dampen:
            added["dampening_loss"] = self.oscillations.penalty(self.progress)
        return added

    def after_step(self) -> None:
        if self.oscillations is not None:
            self.oscillations.update(self.progress)

    def after_epoch(self, log: RunLog, stage: str, step: int) -> str:
        """Draw the shares of oscillating and frozen weights; return words for the log."""
        if self.oscillations is None:
            return ""
        curves = {
            f"{OF_QUANTIZERS}oscillating/{name}.weight_quantizer": each.oscillating / each.weights
            for name, each in self.oscillations.by_layer().items()
        }
        weights, oscillating, frozen = self.oscillations.count()
        shares = {"oscillating": 100 * oscillating / weights}
        if self.oscillations.freeze is not None:
            shares["frozen_weights"] = 100 * frozen / weights
        log.scalars(stage, "train", curves | shares, step)
        return ", ".join(f"{name.replace('_', ' ')} {share:.1f} %" for name, share in shares.items())

    def state_dict(self) -> State:
        """Return the state of the aids that have one; it is no part of the model's."""
        return {} if self.oscillations is None else {"oscillations": self.oscillations.state_dict()}

    def load_state_dict(self, state: State) -> None:
        if self.oscillations is not None:
            self.oscillations.load_state_dict(state["oscillations"])


def build_distillation(
    config: RunConfig, stage: StageConfig, classes: int, float_weights: Path, device: torch.device
) -> Distillation | None:
    """Build the distillation of a stage with its teacher; None if it has none."""
    wanted = stage.distillation if isinstance(stage, QATStageConfig) else None
    if wanted is None:
        return None
    if wanted.teacher is None:
        teacher = build_model(config.model, classes, with_weights=False)
        load_float_weights(teacher, float_weights, config.model.name)
    else:
        teacher = _other(wanted.teacher, classes)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    teacher.to(device).to(memory_format=layout).requires_grad_(False)
    amp = None if wanted.amp == "none" else torch.bfloat16
    return Distillation(teacher, amp=amp, **wanted.model_dump(include={"temperature", "weight", "features"}))


def check_distillation(config: RunConfig, model: nn.Module, prepared: nn.Module, data: Data, anew: bool) -> None:
    """Distil once, so that a teacher that does not fit shows before any training."""
    wanted = config.qat.distillation
    if wanted is None:
        return
    teacher = copy.deepcopy(model) if wanted.teacher is None else _other(wanted.teacher, len(data.classes), anew)
    student, images = copy.deepcopy(model), torch.zeros(2, *data.image_shape)
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
    # A torchvision model needs weights to teach anything; a callable may have brought its own.
    if ":" not in config.name and config.weights is None and config.checkpoint is None:
        raise UserError(
            f"qat.distillation.teacher: {config.name} has no weights; set checkpoint or weights of it, or leave teacher"
            " out to learn from the run's float model"
        )
    with problems_of("qat.distillation.teacher"):
        return build_model(config, classes, with_weights=with_weights)
