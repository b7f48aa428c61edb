"""Sentences about settings without effect, and about results no better than before."""

import math

from qat.batch_norm import batch_norms
from qat.collectives import rank_count
from qat.quantizer import Quantizer
from qat.quantizer.training import weight_bits
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.loop.evaluation import Evaluation
from qat.training.loop.stage import StageRun, key_of

# Settings that a stage without epochs may have: they are chosen by bits, or have an effect there.
OF_ANY_LENGTH = ("epochs", "optimizer", "lr", "schedule", "progressive", "bn_reestimate")
SIGMAS = 2.0  # standard deviations from which a difference counts, given the size of the validation split
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
            late = {"gradual": stage.gradual, "oscillation": stage.oscillation}
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
    for name in ("exact_sums", "packed", "opset"):
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


def warnings_about(name: str, key: str, stage: StageConfig, evaluation: Evaluation, start: float | None) -> list[str]:
    """Return a warning if a result is at chance level, or worse than `start`, if any.

    Chance level is that of the same answer for all images; `start` is the top1 that the stage started from.
    """
    advice = f"; try a lower {key} (now {stage.lr:g}) or more epochs" if stage.epochs else ""
    found = f"{name}: val top1 {evaluation.top1:.2f} %"
    chance = evaluation.most_common + _deviation(evaluation.most_common, evaluation.count)
    if evaluation.most_common == 100 or evaluation.top1 <= chance < 100:  # else there are too few images to tell
        luck = f", with luck up to {chance:.2f} %" * (evaluation.top1 > evaluation.most_common)
        return [
            f"{found} is at chance level: the same answer for all {evaluation.count} images gives"
            f" {evaluation.most_common:.2f} %{luck}{advice}"
        ]
    if start is not None:
        both = (start + evaluation.top1) / 2
        if evaluation.top1 < start - math.sqrt(2) * _deviation(both, evaluation.count):
            return [f"{found} is below the {start:.2f} % that it started from{advice}"]
    return []


def _deviation(percent: float, count: int) -> float:
    share = percent / 100
    return 100 * SIGMAS * math.sqrt(share * (1 - share) / count)
