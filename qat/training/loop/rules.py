"""The training loop's support for quantization rules: annealing, penalties, EWGS's delta."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qat.ewgs import update_ewgs
from qat.quantizer import Quantizer
from qat.training.errors import value_errors_reported
from qat.training.loop.evaluation import TrainBatches


class RuleSchedule:
    """Calls the hooks of a model's quantizers that define them; which ones do is found once, at construction."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
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
        """Set the training progress (0 to 1) of annealed rules."""
        for quantizer in self.annealed:
            quantizer.set_progress(progress)

    def with_penalty(self, loss: Tensor) -> Tensor:
        """Return the loss plus the penalties of the rules."""
        for quantizer in self.penalised:
            penalty = quantizer.penalty()
            loss = loss if penalty is None else loss + penalty
        return loss
