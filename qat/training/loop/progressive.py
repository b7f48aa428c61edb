"""Progressive bit-widths: stages of QAT on grids of their own, each from the weights of the one before."""

from torch import nn

from qat.analysis.state import float_state_dict
from qat.training.config.schema import RunConfig
from qat.training.config.stages import ProgressiveConfig, QATStageConfig, SpecConfig


def progressive_stages(config: QATStageConfig) -> dict[str, ProgressiveConfig]:
    """The stages before the last, by the names that they have in curves and checkpoints: qat_1, qat_2 and so on."""
    return {f"qat_{number}": stage for number, stage in enumerate(config.progressive, 1)}


def key_of(name: str) -> str:
    """Where the config says how a stage trains, by the stage's name.

    >>> key_of("float"), key_of("qat_2"), key_of("qat"), key_of("float_finetune")
    ('float', 'qat.progressive[1]', 'qat', 'qat')
    """
    number = name.removeprefix("qat_")
    return f"qat.progressive[{int(number) - 1}]" if number != name else "float" if name == "float" else "qat"


def rate_key(config: RunConfig, name: str) -> str:
    """The key of a stage's learning rate; an earlier stage may have one of its own."""
    earlier = progressive_stages(config.qat).get(name)
    return f"{'qat' if earlier is not None and earlier.lr is None else key_of(name)}.lr"


def on_grids_of(config: RunConfig, stage: ProgressiveConfig) -> RunConfig:
    """The run's config with the stage's grids, which are not exported; what it leaves out is as in the last one."""
    bits = SpecConfig(bits=stage.bits)
    grids = {
        tensor: _changed(_changed(getattr(config.quantization, tensor), bits), getattr(stage, tensor))
        for tensor in ("weight", "activation")
    }
    not_exported = config.export.model_copy(update={"onnx": False})
    quantization = config.quantization.model_copy(update=grids)
    return config.model_copy(update={"quantization": quantization, "export": not_exported})


def training_of(config: QATStageConfig, stage: ProgressiveConfig) -> QATStageConfig:
    """How the stage trains: as the last one, but for its epochs and rate; nothing is frozen yet."""
    return config.model_copy(
        update={
            "epochs": stage.epochs,
            "lr": config.lr if stage.lr is None else stage.lr,
            "warmup_epochs": min(config.warmup_epochs, stage.epochs),
            "freeze_bn_epoch": None,
            "freeze_scales_epoch": None,
            "oscillation": None,
        }
    )


def float_counterpart(config: QATStageConfig) -> QATStageConfig:
    """How the float model is fine-tuned for comparison: for all epochs of QAT, and not from itself as a teacher."""
    epochs = config.epochs + sum(stage.epochs for stage in config.progressive)
    own_teacher = config.distillation is not None and config.distillation.teacher is None
    return config.model_copy(
        update={"epochs": epochs, "oscillation": None, **({"distillation": None} if own_teacher else {})}
    )


def take_weights(model: nn.Module, trained: nn.Module) -> None:
    """Give a prepared model what another has learned on other grids, without its ranges; calibrate it afterwards."""
    model.load_state_dict(float_state_dict(trained), strict=False)


def _changed(spec: SpecConfig, change: SpecConfig) -> SpecConfig:
    return spec.model_copy(update=change.model_dump(exclude_none=True))
