"""The `gradual` block of a stage, as the aid that the trainer calls."""

from torch import nn

from qat.finetuning import GradualQuantization
from qat.quantizer import Quantizer
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.errors import value_errors_reported


def build_gradual(model: nn.Module, stage: StageConfig) -> GradualQuantization | None:
    """The aid of the stage; None without the block, and for a float model that trains with QAT's settings.

    Raises:
        UserError: if the model has no quantizer of the kind that would be gradual.
    """
    block = stage.gradual if isinstance(stage, QATStageConfig) else None
    if block is None or not any(isinstance(each, Quantizer) for each in model.modules()):
        return None
    with value_errors_reported("qat.gradual: "):
        return GradualQuantization(model, **block.model_dump())
