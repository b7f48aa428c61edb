"""Quant-noise: weights that are quantized in parts."""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qat.inputs import expect_model
from qat.quantizer import Quantizer


class QuantNoise:
    """Quantize a random share of each weight while a prepared model trains (arXiv:2004.07320).

    The elements are drawn anew whenever the weight is used in training; the others pass in float, with their gradient
    as it is. Evaluation and export see all of it quantized.

        rate = share + (1 - share) * progress / until    until progress `until`, then 1
        w' = where(u < rate, Q(w), w)    with u uniform in 0 to 1, from torch's generator of the weight's device

    It has no state but the progress: a resumed training that restores torch's generators goes on bitwise. Quantizers
    that are switched off when it is made stay off. Until all is quantized the layers train operation by operation and
    not on codes, so a step costs up to that of plain training (docs/training_loop.md has figures), and for every weight
    a draw of its size; compiled code would not follow. A table that is looked up with `sparse=True` is always quantized
    whole.

    The model is prepared and calibrated. share is from 0 to below 1, until above 0 to 1.

    The attribute `rate` is the share of the elements that is quantized now.

    >>> import qat
    >>> images = torch.randn(32, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), example_inputs=images)
    >>> qat.calibrate(model, [images])
    >>> noise = QuantNoise(model, share=0.5)
    >>> for step in range(5):
    ...     noise.set_progress(step / 4)  # before each training step
    ...     loss = model.train()(images).sum()
    ...     print(noise.rate)
    0.5
    0.75
    1.0
    1.0
    1.0
    >>> noise.complete()  # before each evaluation, and at the end
    """

    def __init__(self, model: nn.Module, *, share: float, until: float = 0.5) -> None:
        expect_model(QuantNoise, model, locals())
        if not 0 <= share < 1:
            raise ValueError(f"QuantNoise: share must be from 0 to below 1, got {share!r}")
        if not 0 < until <= 1:
            raise ValueError(f"QuantNoise: until must be above 0 to 1, got {until!r}")
        self.share, self.until, self.rate = share, until, 1.0
        found = [each for each in model.modules() if isinstance(each, Quantizer) and each.role == "weight"]
        if not found:
            raise ValueError("QuantNoise: the model has no quantizer of weights; call qat.prepare first")
        self._weights = [each for each in found if not each.is_disabled]  # those that the user switched off stay off
        self._hooks: list[RemovableHandle] = []

    def set_progress(self, progress: float) -> None:
        """Quantize what is due at this progress, 0 to 1; call it before each step."""
        if not 0 <= progress <= 1:
            raise ValueError(f"QuantNoise: progress must be from 0 to 1, got {progress!r}")
        self.rate = self.share + (1.0 - self.share) * min(progress / self.until, 1.0)
        if self.rate >= 1:
            self.complete()
        elif not self._hooks:
            self._hooks = [weight.register_forward_hook(self._in_part) for weight in self._weights]

    def complete(self) -> None:
        """Quantize everything until the next `set_progress`.

        Call it before an evaluation, a checkpoint or an export.
        """
        self.rate = 1.0
        while self._hooks:
            self._hooks.pop().remove()

    def _in_part(self, quantizer: nn.Module, arguments: tuple[Tensor], quantized: Tensor) -> Tensor | None:
        if not quantizer.training:
            return None  # keeps the quantizer's answer
        drawn = torch.empty_like(quantized, dtype=torch.bool).bernoulli_(self.rate)
        return torch.where(drawn, quantized, arguments[0])

    _in_part.for_a_time = True  # type: ignore[attr-defined]  # no copy of a quantizer has it
