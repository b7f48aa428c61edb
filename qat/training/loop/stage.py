"""Stages of training: inputs, those of a config by name, settings without effect."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from qat.batch_norm import batch_norms
from qat.collectives import rank_count
from qat.finetuning import Distillation
from qat.quantizer import Quantizer
from qat.quantizer.training import weight_bits
from qat.training.config.schema import RunConfig
from qat.training.config.stages import ProgressiveConfig, QATStageConfig, StageConfig
from qat.training.run.folder import Json
from qat.training.run.logging import RunLog

Batch: TypeAlias = tuple[Tensor, Tensor]  # images and labels
# From images (N, C, H, W) and labels (N,) to mixed images and the share of every class in each, (N, classes).
Mixing: TypeAlias = Callable[[Tensor, Tensor], Batch]


class Batches(Protocol):
    """Batches of images (NCHW float32) and labels (int64) on the CPU, maybe pinned."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...


class TrainBatches(Batches, Protocol):
    """Batches for training, in an order that depends on the epoch."""

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Choose the epoch of order and augmentation, and the first batch."""


def steps_per_epoch(stage: StageConfig, train: TrainBatches) -> int:
    return math.ceil(len(train) / stage.accumulate)


@dataclass
class StageRun:
    """Everything that one stage of training needs."""

    name: str
    stage: StageConfig
    config: RunConfig
    model: nn.Module
    train: TrainBatches
    val: Batches
    device: torch.device
    log: RunLog
    folder: Path
    results: Json = field(default_factory=dict)
    first_step: int = 0  # steps of the stages before it, so that curves join
    epochs_before: int = 0  # epochs of the stages that it continues, so that no order of images repeats
    later_steps: int = 0  # steps of the stages after it, for the time left
    keep_best: bool = True
    sample: Batches | None = None  # training images without augmentation, by which `settle_statistics` compares
    distillation: Distillation | None = None
    mixing: Mixing | None = None
    about: Json = field(default_factory=dict)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.stage, self.train)

    @property
    def wants_graphs(self) -> bool:
        """True if steps should run as CUDA graphs, where they can."""
        return self.device.type == "cuda" and bool(self.config.cuda_graphs) and not self.config.compile

    @property
    def in_graphs(self) -> bool:
        return self.wants_graphs and self.graphs_refused is None

    @property
    def graphs_refused(self) -> str | None:
        """The reason why steps cannot run as CUDA graphs, or None."""
        qat = self.config.qat
        if rank_count() > 1:
            return "the ranks sum their gradients during the backward"
        if self.stage.accumulate > 1:
            return "accumulate adds to gradients in whose memory a graph writes those of the next batch"
        if qat.quant_noise is not None:
            return "quant_noise draws in hooks of weights"
        if qat.distillation is not None and qat.distillation.features:
            return "distillation.features reads tensors inside the model"
        return None

    def step(self, epoch: int, number: int = 0) -> int:
        """Return the run's step count after whole epochs of this stage and some steps."""
        return self.first_step + epoch * self.steps_per_epoch + number


def progressive_stages(config: QATStageConfig) -> dict[str, ProgressiveConfig]:
    """Return the stages before the last by their names, qat_1, qat_2 and so on."""
    return {f"qat_{number}": stage for number, stage in enumerate(config.progressive, 1)}


def stages_of(config: RunConfig) -> dict[str, StageConfig]:
    """Return the training settings of each stage of a run by name, in their order."""
    earlier = {name: training_of(config.qat, stage) for name, stage in progressive_stages(config.qat).items()}
    return {"float": config.float, "float_finetune": float_counterpart(config.qat), **earlier, "qat": config.qat}


def steps_after(config: RunConfig, name: str, train: TrainBatches) -> int:
    """Return the number of training steps in the stages after this one."""
    stages = stages_of(config)
    later = list(stages)[list(stages).index(name) + 1 :]
    wanted = [stages[key] for key in later if key != "float_finetune" or config.float_finetune]
    return sum(stage.epochs * steps_per_epoch(stage, train) for stage in wanted)


def key_of(name: str) -> str:
    """Return the config key of a stage's training settings.

    >>> key_of("float"), key_of("qat_2"), key_of("qat"), key_of("float_finetune")
    ('float', 'qat.progressive[1]', 'qat', 'qat')
    """
    number = name.removeprefix("qat_")
    return f"qat.progressive[{int(number) - 1}]" if number != name else "float" if name == "float" else "qat"


def rate_key(config: RunConfig, name: str) -> str:
    """Return the config key of a stage's learning rate."""
    earlier = progressive_stages(config.qat).get(name)
    return f"{'qat' if earlier is not None and earlier.lr is None else key_of(name)}.lr"


def on_grids_of(config: RunConfig, stage: ProgressiveConfig) -> RunConfig:
    """Return the run's config with the grids of a stage, which are not exported."""
    grids = {}
    for tensor in ("weight", "activation"):
        changes = {"bits": stage.bits, **getattr(stage, tensor).model_dump(exclude_none=True)}
        given = {key: value for key, value in changes.items() if value is not None}
        grids[tensor] = getattr(config.quantization, tensor).model_copy(update=given)
    not_exported = config.export.model_copy(update={"onnx": False})
    quantization = config.quantization.model_copy(update=grids)
    return config.model_copy(update={"quantization": quantization, "export": not_exported})


def training_of(config: QATStageConfig, stage: ProgressiveConfig) -> QATStageConfig:
    """Return a stage's settings: the last one's, but for epochs, rate and freezing."""
    own: Json = {"epochs": stage.epochs, "lr": config.lr if stage.lr is None else stage.lr}
    own |= {"warmup_epochs": min(config.warmup_epochs, stage.epochs)}
    own |= dict.fromkeys(("freeze_bn_epoch", "freeze_scales_epoch", "oscillation"))
    return config.model_copy(update=own)


def float_counterpart(config: QATStageConfig) -> QATStageConfig:
    """Return QAT's settings for fine-tuning the float model, for all of its epochs."""
    epochs = config.epochs + sum(stage.epochs for stage in config.progressive)
    # Without a teacher of its own, the float model would learn from itself.
    other = config.distillation if config.distillation and config.distillation.teacher else None
    return config.model_copy(update={"epochs": epochs, "oscillation": None, "distillation": other})


# Settings that a stage without epochs may have: they are chosen by bits, or have an effect there.
OF_ANY_LENGTH = ("epochs", "optimizer", "lr", "schedule", "progressive", "bn_reestimate")


START_LEFT = 0.5  # largest share of the starting weights in the averages, decay ** steps, without a warning


def without_effect(run: StageRun) -> list[str]:
    """Return a sentence for each setting that has no effect, or an unexpected one."""
    stage, key = run.stage, key_of(run.name)
    if run.name not in ("float", "qat"):  # most settings are those of the last stage, which reports them
        return too_slow(run)
    found = []
    if stage.bn_reestimate == "always" and not batch_norms(run.model):
        found.append(f"{key}.bn_reestimate: always has no effect: the model has no BatchNorm")
    if stage.epochs == 0:
        return found + _untrained(stage, key) + _of_the_whole_run(run)
    if stage.optimizer == "adamw" and stage.momentum != StageConfig().momentum:
        found.append(f"{key}.momentum: {stage.momentum:g} has no effect: {key}.optimizer is adamw, which has none")
    if stage.accumulate > len(run.train):
        batches = f"the {len(run.train)} batches of an epoch"
        found.append(f"accumulate: {stage.accumulate} is more than {batches}; each epoch is one step")
    if isinstance(stage, QATStageConfig):
        for name in ("freeze_bn_epoch", "freeze_scales_epoch"):
            first = getattr(stage, name)
            if first is not None and first >= stage.epochs:
                found.append(f"{key}.{name}: {first} has no effect: the last of {stage.epochs} is {stage.epochs - 1}")
        if stage.epochs * run.steps_per_epoch == 1:
            late = {"quant_noise": stage.quant_noise, "oscillation": stage.oscillation}
            found += [f"{key}.{name} has no effect: the stage has one step" for name, block in late.items() if block]
        found += _of_optimizers(run, stage, key)
    if run.config.sync_batch_norm and rank_count() == 1:
        found.append("sync_batch_norm: true has no effect: the run has one rank")
    return found + too_slow(run) + _of_the_whole_run(run)


def _of_optimizers(run: StageRun, stage: QATStageConfig, key: str) -> list[str]:
    found, quantizers = [], [each for each in run.model.modules() if isinstance(each, Quantizer)]
    if not any(parameter.requires_grad for each in quantizers for parameter in each.parameters()):
        keys = ("quantizer_lr_factor", "quantizer_lr", "quantizer_weight_decay", "quantizer_optimizer")
        found = [f"{key}.{name} has no effect: no quantizer learns" for name in keys if getattr(stage, name)]
    if stage.weight_decay_by_bits and (not stage.weight_decay or min(weight_bits(run.model).values(), default=8) >= 4):
        why = "no weight has fewer than 4 bits" if stage.weight_decay else f"{key}.weight_decay is 0"
        found.append(f"{key}.weight_decay_by_bits has no effect: {why}")
    return found


def _of_the_whole_run(run: StageRun) -> list[str]:
    if run.name != "qat":
        return []
    found, export, bits = [], run.config.export, run.config.quantization.residual_bits
    for name in ("exact_sums", "packed", "opset", "dynamic"):
        value = getattr(export, name)
        if not export.onnx and value != type(export).model_fields[name].default:
            found.append(f"export.{name}: {str(value).lower()} has no effect: export.onnx is false")
    quantizers = [each for each in run.model.modules() if isinstance(each, Quantizer) and each.role == "activation"]
    if bits is not None and all(each.spec.bits != bits for each in quantizers):
        found.append(f"quantization.residual_bits: {bits} has no effect: nothing in the model reads a residual stream")
    return found


def _untrained(stage: StageConfig, key: str) -> list[str]:
    usual = type(stage)()
    if isinstance(stage, QATStageConfig) and stage.progressive:
        return []  # the stages before it use them
    names = (name for name in type(stage).model_fields if name not in OF_ANY_LENGTH)
    named = [f"{key}.{name}" for name in names if getattr(stage, name) != getattr(usual, name)]
    return [f"{', '.join(named)} {'has' if len(named) == 1 else 'have'} no effect: {key}.epochs is 0"] if named else []


def too_slow(run: StageRun) -> list[str]:
    """Return a sentence if averaged weights are mostly those of the start."""
    decay, steps = run.stage.ema_decay, run.stage.epochs * run.steps_per_epoch
    if decay is None or steps == 0 or decay**steps <= START_LEFT:
        return []
    return [
        f"ema_decay: {decay:g} is slow for the {steps} steps of this stage: its averages are {100 * decay**steps:.0f} %"
        f" what the stage starts from; try {1 - 10 / max(steps, 20):.2g}"
    ]
