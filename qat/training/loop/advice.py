"""What a stage says of its settings that change nothing."""

from qat.batch_norm import batch_norms
from qat.collectives import rank_count
from qat.quantizer import Quantizer
from qat.quantizer.training import weight_bits
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.loop.metrics import too_slow
from qat.training.loop.stage import StageRun, key_of

OF_ANY_LENGTH = ("epochs", "optimizer", "lr", "schedule", "progressive", "bn_reestimate")
"""Settings that a stage without epochs may have: they are set by bits, or have an effect there."""


def without_effect(run: StageRun) -> list[str]:
    """A sentence for each setting that has no effect, or another one than its name says.

    A stage before the last has all settings of the last one but its own, which then says these things.
    """
    stage, key = run.stage, key_of(run.name)
    if run.name not in ("float", "qat"):
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
    """Rates and decays of parameters that the model does not have."""
    found, quantizers = [], [each for each in run.model.modules() if isinstance(each, Quantizer)]
    if not any(parameter.requires_grad for each in quantizers for parameter in each.parameters()):
        keys = ("quantizer_lr_factor", "quantizer_lr", "quantizer_weight_decay", "quantizer_optimizer")
        found = [f"{key}.{name} has no effect: no quantizer learns" for name in keys if getattr(stage, name)]
    if stage.weight_decay_by_bits and (not stage.weight_decay or min(weight_bits(run.model).values(), default=8) >= 4):
        why = "no weight has fewer than 4 bits" if stage.weight_decay else f"{key}.weight_decay is 0"
        found.append(f"{key}.weight_decay_by_bits has no effect: {why}")
    return found


def _of_the_whole_run(run: StageRun) -> list[str]:
    """What `quantization` and `export` say in vain; the last stage has the model that they are about."""
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
    """The settings of a stage that trains nothing, in one sentence."""
    usual = type(stage)()
    named = [
        f"{key}.{name}" for name in type(stage).model_fields
        if name not in OF_ANY_LENGTH and getattr(stage, name) != getattr(usual, name)
    ]  # fmt: skip
    if isinstance(stage, QATStageConfig) and stage.progressive:
        return []  # the stages before it use them
    have = "has" if len(named) == 1 else "have"
    return [f"{', '.join(named)} {have} no effect: {key}.epochs is 0"] if named else []
