"""The optimizer, its parameter groups (each with a weight decay and a learning rate), and the schedule."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from qat.quantizer import Quantizer
from qat.torch_internals import BatchOrInstanceNorm
from qat.training.config.schema import QATStageConfig, StageConfig
from qat.training.errors import UserError

WARMUP_START = 0.01
"""Start of the warm-up, as a share of the peak learning rate."""

NORMS = (BatchOrInstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""torch's normalisation modules with parameters; the first is the base of every BatchNorm and InstanceNorm."""


def parameter_groups(model: nn.Module, stage: StageConfig) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a model into groups for an optimizer.

    - `quantizers`: all parameters inside a `Quantizer`; no weight decay, and in QAT the learning rate
      lr * quantizer_lr_factor.
    - `norms`: the parameters of normalisation modules; norm_weight_decay.
    - `biases`: all others that are named bias or have at most one axis; norm_weight_decay.
    - `weights`: the rest; weight_decay.

    Returns:
        Groups with the keys name, params, lr and weight_decay, in the order weights, norms, biases, quantizers, without
        empty groups. Each trainable parameter is in exactly one, also if it is shared.

    Raises:
        UserError: if the model has no trainable parameter.
    """
    factor = stage.quantizer_lr_factor if isinstance(stage, QATStageConfig) else 1.0
    rates = {
        "weights": (stage.lr, stage.weight_decay),
        "norms": (stage.lr, stage.norm_weight_decay),
        "biases": (stage.lr, stage.norm_weight_decay),
        "quantizers": (stage.lr * factor, 0.0),
    }
    members: dict[str, list[nn.Parameter]] = {kind: [] for kind in rates}
    of_quantizers, of_norms = _parameters_inside(model, (Quantizer,)), _parameters_inside(model, NORMS)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in of_quantizers:
            kind = "quantizers"
        elif id(parameter) in of_norms:
            kind = "norms"
        elif parameter.dim() <= 1 or name.rpartition(".")[2] == "bias":
            kind = "biases"
        else:
            kind = "weights"
        members[kind].append(parameter)
    if not any(members.values()):
        raise UserError("model: it has no trainable parameter; set epochs to 0 or unfreeze some")
    return [
        {"name": kind, "params": members[kind], "lr": lr, "weight_decay": decay}
        for kind, (lr, decay) in rates.items()
        if members[kind]
    ]


def build_optimizer(model: nn.Module, stage: StageConfig) -> torch.optim.Optimizer:
    """Build SGD (with Nesterov momentum, if there is momentum) or AdamW over `parameter_groups(model, stage)`.

    The model is on the device and in the memory format of its training.
    """
    groups = parameter_groups(model, stage)
    # The fused step is one kernel per tensor list, 3 to 4 times faster than torch's default for ResNet-18 on a CPU.
    # On CUDA it also lets a gradient scaler skip a step without a synchronisation.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for g in groups for p in g["params"])
    if stage.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=stage.lr, fused=fused or None)
    return torch.optim.SGD(
        groups, lr=stage.lr, momentum=stage.momentum, nesterov=stage.momentum > 0, fused=fused or None
    )


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


def _parameters_inside(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[int]:
    """Return the ids of all parameters inside modules of these kinds, at any depth."""
    return {id(p) for module in model.modules() if isinstance(module, kinds) for p in module.parameters()}
