"""Quantization by degrees: activations after weights, weights in parts."""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qat.inputs import expect_model
from qat.quantizer import Quantizer


class GradualQuantization:
    """Quantize a prepared model by degrees while it trains.

    Evaluation and export see all of it quantized. Activations pass in float until progress `activations_from`: the
    weights find their levels first. Of each weight a random share of the elements is quantized, drawn anew whenever the
    weight is used in training; the others pass in float, with their gradient as it is (quant-noise, arXiv:2004.07320):

        share = weight_share + (1 - weight_share) * progress / weights_from    until weights_from, then 1
        w' = where(u < share, Q(w), w)    with u uniform in 0 to 1, from torch's generator of the weight's device

    It has no state but the progress: a resumed training that restores torch's generators goes on bitwise. Quantizers
    that are switched off when it is made stay off. Until a side is on for good, what it touches trains operation by
    operation and not on codes, so a step costs up to that of plain training (docs/training_loop.md has figures), and
    for every weight a draw of its size; compiled code would not follow its switches. The ranges of activations are
    those of `calibrate` until they are on. A table that is looked up with `sparse=True` is always quantized whole.

    The model is prepared and calibrated. activations_from is from 0 (always) to below 1, weight_share from 0 to 1 (all,
    always), weights_from above 0 to 1.

    The attribute `share` is that of the elements of weights that are quantized now.

    >>> import qat
    >>> images = torch.randn(32, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), example_inputs=images)
    >>> qat.calibrate(model, [images])
    >>> gradual = GradualQuantization(model, activations_from=0.25, weight_share=0.5)
    >>> for step in range(5):
    ...     gradual.set_progress(step / 4)  # before each training step
    ...     loss = model.train()(images).sum()
    ...     print(gradual.share, model.input_quantizer.is_disabled)
    0.5 True
    0.75 False
    1.0 False
    1.0 False
    1.0 False
    >>> gradual.complete()  # before each evaluation, and at the end
    """

    def __init__(
        self, model: nn.Module, *, activations_from: float = 0.0, weight_share: float = 1.0, weights_from: float = 0.5
    ) -> None:
        expect_model(GradualQuantization, model, locals())
        self.activations_from, self.weight_share, self.weights_from = activations_from, weight_share, weights_from
        for name, inside, bounds in (
            ("activations_from", 0 <= activations_from < 1, "from 0 to below 1"),
            ("weight_share", 0 <= weight_share <= 1, "from 0 to 1"),
            ("weights_from", 0 < weights_from <= 1, "above 0 to 1"),
        ):
            if not inside:
                raise ValueError(f"GradualQuantization: {name} must be {bounds}, got {getattr(self, name)!r}")
        if activations_from == 0 and weight_share == 1:
            raise ValueError("GradualQuantization: nothing is gradual; set activations_from or weight_share")
        self.share = 1.0
        self._activations = _switched_on(model, "activation") if activations_from > 0 else []
        self._weights = _switched_on(model, "weight") if weight_share < 1 else []
        self._hooks: list[RemovableHandle] = []

    def set_progress(self, progress: float) -> None:
        """Quantize what is due at this progress, 0 to 1; call it before each step."""
        if not 0 <= progress <= 1:
            raise ValueError(f"GradualQuantization: progress must be from 0 to 1, got {progress!r}")
        self._switch(progress >= self.activations_from)
        gone = min(progress / self.weights_from, 1.0)
        self.share = self.weight_share + (1.0 - self.weight_share) * gone
        if self.share >= 1:
            self._unhook()
        elif not self._hooks:
            self._hooks = [weight.register_forward_hook(self._in_part) for weight in self._weights]

    def complete(self) -> None:
        """Quantize everything until the next `set_progress`.

        Call it before an evaluation, a checkpoint or an export.
        """
        self._switch(True)
        self.share = 1.0
        self._unhook()

    def _switch(self, on: bool) -> None:
        for quantizer in self._activations:
            quantizer.is_disabled = not on

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _in_part(self, quantizer: nn.Module, arguments: tuple[Tensor], quantized: Tensor) -> Tensor | None:
        if not quantizer.training:
            return None  # keeps the quantizer's answer
        drawn = torch.empty_like(quantized, dtype=torch.bool).bernoulli_(self.share)
        return torch.where(drawn, quantized, arguments[0])

    _in_part.for_a_time = True  # type: ignore[attr-defined]  # no copy of a quantizer has it


def _switched_on(model: nn.Module, role: str) -> list[Quantizer]:
    found = [each for each in model.modules() if isinstance(each, Quantizer) and each.role == role]
    if not found:
        raise ValueError(f"GradualQuantization: the model has no quantizer of {role}s; call qat.prepare first")
    return [each for each in found if not each.is_disabled]  # those that the user switched off stay off
