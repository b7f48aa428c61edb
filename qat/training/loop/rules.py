"""What the training loop does for the rules of a model: annealing, penalties, EWGS's delta."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qat.ewgs import update_ewgs
from qat.quantizer import Quantizer
from qat.training.errors import UserError
from qat.training.loop.evaluation import TrainBatches


class RuleSchedule:
    """Looks once which quantizers of a model want something of the loop, and asks only those.

    Args:
        model: the one that is trained; without quantizers there is nothing to do.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
        self.annealed = [q for q in quantizers if type(q).set_progress is not Quantizer.set_progress]
        self.penalised = [q for q in quantizers if type(q).penalty is not Quantizer.penalty]
        self.curved = any(q.spec.ewgs == "hessian" for q in quantizers)

    def before_epoch(self, loss_of: Callable[[Any], Tensor], batches: TrainBatches) -> None:
        """Find delta anew on the first batch, where a quantizer has ewgs="hessian".

        Raises:
            UserError: if the model has an operation without a second derivative.
        """
        if self.curved:
            try:
                update_ewgs(self.model, lambda _model, batch: loss_of(batch), [next(iter(batches))])
            except ValueError as error:
                raise UserError(f"quantization: {error}") from error

    def before_step(self, progress: float) -> None:
        """Tell annealed rules how far the training is, 0 to 1."""
        for quantizer in self.annealed:
            quantizer.set_progress(progress)

    def with_penalty(self, loss: Tensor) -> Tensor:
        """The loss and what the rules add to it."""
        for quantizer in self.penalised:
            penalty = quantizer.penalty()
            loss = loss if penalty is None else loss + penalty
        return loss
