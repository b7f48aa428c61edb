"""The optimizer over `qat.parameter_groups`, and the schedule."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from qat.quantizer import Quantizer, parameter_groups
from qat.training.config.by_bits import ADAMW_RATE
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.errors import UserError
from qat.training.loop.two_optimizers import TwoOptimizers

OWN_OF_QUANTIZERS = ("quantizer_lr_factor", "quantizer_lr", "quantizer_weight_decay")
"""Keys of `qat` for the groups of quantizers, which are also arguments of `qat.parameter_groups`."""

HIGH_FOR_ADAMW = 0.005
"""From ten times its rate at 4 bits on, AdamW usually forgets the weights that it starts from."""

WARMUP_START = 0.01
"""Start of the warm-up, as a share of the peak learning rate."""


def build_optimizer(model: nn.Module, stage: StageConfig) -> torch.optim.Optimizer:
    """Build SGD (with Nesterov momentum, if there is momentum) or AdamW over `qat.parameter_groups`.

    The model is on the device and in the memory format of its training. With another `quantizer_optimizer`, or
    SGD for activations that are quantized late, there are two, which act as one.

    Raises:
        UserError: if the model has no trainable parameter.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: it has no trainable parameter; set epochs to 0 or unfreeze some")
    own: dict[str, Any] = {"quantizer_lr_factor": 1.0}
    kind, late = stage.optimizer, False  # of quantizers
    if isinstance(stage, QATStageConfig):
        own = {key: getattr(stage, key) for key in OWN_OF_QUANTIZERS}
        own["weight_decay_by_bits"] = stage.weight_decay_by_bits
        kind = stage.quantizer_optimizer or kind
        late = stage.gradual is not None and stage.gradual.activations_from > 0 and kind == "sgd"
    groups = parameter_groups(model, stage.lr, stage.weight_decay, norm_weight_decay=stage.norm_weight_decay, **own)
    parts: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for group in groups:
        scales = group["name"].startswith("quantizers")
        parts.setdefault((kind, late) if scales else (stage.optimizer, False), []).append(group)
    built = [_optimizer(kind, part, stage, late) for (kind, late), part in parts.items()]
    return built[0] if len(built) == 1 else TwoOptimizers(built)


def _optimizer(kind: str, groups: list[dict[str, Any]], stage: StageConfig, late: bool) -> torch.optim.Optimizer:
    """One kind of optimizer; torch's fused SGD raises where some parameters get their first gradient late."""
    # The fused step is one kernel per tensor list, 3 to 4 times faster than torch's default for ResNet-18 on a CPU.
    # On CUDA it also lets a gradient scaler skip a step without a synchronisation.
    fused = not late and all(
        p.device.type in ("cpu", "cuda") and p.is_floating_point() for g in groups for p in g["params"]
    )
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=stage.lr, fused=fused or None)
    return torch.optim.SGD(
        groups, lr=stage.lr, momentum=stage.momentum, nesterov=stage.momentum > 0, fused=fused or None
    )


def groups_in_words(optimizer: torch.optim.Optimizer, model: nn.Module, stage: StageConfig) -> str:
    """Sentences on optimizers, rates and decays, and on settings without effect; "" without quantizers."""
    if not isinstance(stage, QATStageConfig) or not any(isinstance(each, Quantizer) for each in model.modules()):
        return ""
    said = [f"{stage.optimizer} at lr {stage.lr:g}{_rates_of_scales(optimizer, stage)}"]
    if stage.optimizer == "adamw" and stage.lr >= HIGH_FOR_ADAMW:
        said.append(f"that is high for adamw, whose own rate is {ADAMW_RATE:g} at 4 bits; qat.optimizer=sgd takes such")
    said.append(_decays_of_weights(optimizer, stage))
    if not any(group["name"].startswith("quantizers") for group in optimizer.param_groups):
        keys = [key for key in (*OWN_OF_QUANTIZERS, "quantizer_optimizer") if getattr(stage, key)]
        said += [f"qat.{key} has no effect: no quantizer learns" for key in keys]
    return "; ".join(filter(None, said))


def _rates_of_scales(optimizer: torch.optim.Optimizer, stage: QATStageConfig) -> str:
    """How scales learn, behind the words on the weights; "" if none learns."""
    groups = [group for group in optimizer.param_groups if group["name"].startswith("quantizers")]
    if not groups:
        return ""
    by_bits = [
        f"{group['initial_lr'] / stage.lr:.2g} lr ({group['name'].split('_')[1]} bits)"
        for group in groups
        if "_" in group["name"]
    ]
    rates = " and ".join(by_bits)
    if stage.quantizer_lr is not None:
        rates = f"lr {stage.quantizer_lr:g}"
    elif stage.quantizer_lr_factor is not None:
        rates = f"{stage.quantizer_lr_factor:g} lr"
    own = "" if stage.quantizer_optimizer in (None, stage.optimizer) else f"by {stage.quantizer_optimizer} "
    decay = f" with decay {stage.quantizer_weight_decay:g}" if stage.quantizer_weight_decay else ""
    others = "; qat.optimizer, qat.lr and qat.quantizer_lr_factor set others" if by_bits else ""
    return f", scales {own}at {rates}{decay}{others}"


def _decays_of_weights(optimizer: torch.optim.Optimizer, stage: QATStageConfig) -> str:
    if not stage.weight_decay_by_bits:
        return ""
    found = [
        f"{group['weight_decay']:g} ({group['name'].split('_')[1]} bits)"
        for group in optimizer.param_groups
        if group["name"].startswith("weights_")
    ]
    if not found or not stage.weight_decay:
        why = "qat.weight_decay is 0" if found else "no weight has fewer than 4 bits"
        return f"qat.weight_decay_by_bits has no effect: {why}"
    return f"weight decay {stage.weight_decay:g}, of weights on few bits {' and '.join(found)}"


def build_schedule(optimizer: torch.optim.Optimizer, stage: StageConfig, steps_per_epoch: int) -> LambdaLR:
    """Build the schedule of the learning rate: linear warm-up from 1 % of lr, then cosine to 0 or constant.

    With s finished steps, w = warmup_epochs * steps_per_epoch and n = epochs * steps_per_epoch, the factor on lr is
    0.01 + 0.99 * s/w while s < w, then 1 or (1 + cos(pi * (s - w)/(n - w))) / 2. w may be a fraction.
    Each group has its own peak learning rate.
    """
    warmup, total = stage.warmup_epochs * steps_per_epoch, stage.epochs * steps_per_epoch

    def factor(step: int) -> float:
        if step < warmup:
            return WARMUP_START + (1 - WARMUP_START) * step / warmup
        if stage.schedule == "constant" or total == warmup:
            return 1.0
        return (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2

    return LambdaLR(optimizer, factor)
