"""What a stage calls around its steps besides forward, backward and the optimizer: the hooks of rules, and the aids of
the config, which are classes of `qat.finetuning`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from qat.finetuning import Distillation, GradualQuantization, Oscillations
from qat.finetuning.ewgs import update_ewgs
from qat.quantizer import Quantizer
from qat.training.aids.oscillations import report_oscillations
from qat.training.errors import value_errors_reported
from qat.training.loop.evaluation import TrainBatches
from qat.training.run.logging import RunLog


class Aids:
    """Calls the hooks of a model's quantizers that define them, found once at construction, and the stage's aids.

    Args:
        model: the model of the stage.
        distillation: what it learns from besides labels; None for nothing.
        oscillations: what watches its weights; None for nothing.
        gradual: what quantizes it by degrees; None for nothing.

    Attributes:
        student: what a training step calls: the model, or one that returns what the distillation needs too.
    """

    def __init__(
        self,
        model: nn.Module,
        distillation: Distillation | None = None,
        oscillations: Oscillations | None = None,
        gradual: GradualQuantization | None = None,
    ) -> None:
        self.model = model
        self.oscillations, self.progress = oscillations, 0.0
        self.gradual = gradual
        self.distillation = distillation
        self.student = model if distillation is None else distillation.watching(model)
        quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
        self.annealed = [q for q in quantizers if type(q).set_progress is not Quantizer.set_progress]
        self.penalised = [q for q in quantizers if type(q).penalty is not Quantizer.penalty]
        self.curved = any(q.spec.ewgs == "hessian" for q in quantizers)

    def before_epoch(self, loss_of: Callable[[Any], Tensor], batches: TrainBatches) -> None:
        """Update delta from the first batch, if a quantizer has ewgs="hessian".

        Raises:
            UserError: if an operation of the model has no second derivative.
        """
        if self.curved:
            with value_errors_reported("quantization: "):
                update_ewgs(self.model, lambda _model, batch: loss_of(batch), [next(iter(batches))])

    def before_step(self, progress: float) -> None:
        """Tell the annealed rules and the aids the training progress, 0 to 1."""
        self.progress = progress
        for quantizer in self.annealed:
            quantizer.set_progress(progress)
        if self.gradual is not None:
            self.gradual.set_progress(progress)

    def before_evaluation(self) -> None:
        """Quantize all of the model after the training steps of an epoch."""
        if self.gradual is not None:
            self.gradual.complete()

    def added(self, output: Any, images: Tensor) -> dict[str, Tensor]:
        """What is added to the task's loss, by the names of their curves: penalties of rules, losses of aids."""
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
        """What follows the optimizer's step."""
        if self.oscillations is not None:
            self.oscillations.update(self.progress)

    def after_epoch(self, log: RunLog, stage: str, step: int) -> str:
        """Draw the curves of the aids, and return a note for the epoch's line."""
        return "" if self.oscillations is None else report_oscillations(self.oscillations, log, stage, step)

    def state_dict(self) -> dict[str, Any]:
        """The state of the aids that have one, by name: the training's, and so no part of the model's."""
        return {} if self.oscillations is None else {"oscillations": self.oscillations.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        if self.oscillations is not None and "oscillations" in state:
            self.oscillations.load_state_dict(state["oscillations"])
