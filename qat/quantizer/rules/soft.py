"""Rules with soft staircases: `dsq` in the gradient, `stacked_sigmoid` in values."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat.functional import clamp_ste, dsq_round, round_ste, scale_gradient, soft_round
from qat.functional.tensors import overwrite, widened
from qat.quantizer.base import Quantizer
from qat.quantizer.registry import register_quantizer


class SoftQuantizer(Quantizer):
    """Base of the soft rules, which round the clamped x / scale by a staircase.

    y = rounding(clamp(x / scale, qmin - z, qmax - z)) * scale, z the zero point, scale learned.
    """

    def quantize(self, x: Tensor) -> Tensor:
        scale, zero_point = self.grid()
        step = scale_gradient(scale, self.gradient_factor(x))
        low, high = self.bounds()
        v = clamp_ste(widened(x)[0] / step, low - zero_point, high - zero_point)
        return (self.rounded(v) * step).to(x.dtype)

    def rounded(self, v: Tensor) -> Tensor:
        """Round v, in units of the step, by the rule's staircase."""
        raise TypeError(f"{type(self).__name__}: a soft quantizer must implement rounded(v)")


@dataclass(frozen=True)
class DSQOptions:
    """Options of `dsq`: softness at the start, above 0 and below 1; it is learned."""

    alpha: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"option 'alpha' must be above 0 and below 1, got {self.alpha!r}")


@register_quantizer("dsq")
class DSQQuantizer(SoftQuantizer):
    """Rounding with the gradient of a soft tanh staircase (arXiv:1908.05033)."""

    options_type = DSQOptions
    alpha: Tensor

    def add_parameters(self, device: torch.device | str | None) -> None:
        super().add_parameters(device)
        self.alpha = nn.Parameter(torch.tensor(self.options.alpha, device=device))

    def rounded(self, v: Tensor) -> Tensor:
        return dsq_round(v, scale_gradient(clamp_ste(self.alpha, 1e-3, 0.999), self.gradient_factor(v)))

    def curves(self) -> dict[str, Tensor]:
        return {**super().curves(), "softness": self.alpha}

    @torch.no_grad()
    def repair(self) -> None:
        super().repair()
        overwrite(self.alpha, torch.nan_to_num(self.alpha, self.options.alpha).clamp(1e-3, 0.999))


@dataclass(frozen=True)
class StackedSigmoidOptions:
    """Options of `stacked_sigmoid`: the first and the last temperature."""

    start: float = 5.0
    end: float = 100.0

    def __post_init__(self) -> None:
        if not 0 < self.start <= self.end < float("inf"):
            raise ValueError(f"options must hold 0 < start <= end, got start={self.start!r} and end={self.end!r}")


@register_quantizer("stacked_sigmoid")
class StackedSigmoidQuantizer(SoftQuantizer):
    """A sigmoid for every step, which sharpens over the training (arXiv:1911.09464).

    The rule of Quantization Networks. Training computes with values between the levels, evaluation and the exported
    model with the levels themselves; the temperature goes from `start` to `end` in equal factors, as `set_progress`
    says.
    """

    drawn = ("temperature",)
    options_type = StackedSigmoidOptions
    temperature: Tensor

    def add_parameters(self, device: torch.device | str | None) -> None:
        super().add_parameters(device)
        self.register_buffer("temperature", torch.tensor(self.options.start, device=device))  # checkpoints carry it

    def rounded(self, v: Tensor) -> Tensor:
        return soft_round(v, self.temperature) if self.training else round_ste(v)

    def set_progress(self, progress: float) -> None:
        options = self.options
        self.temperature.fill_(options.start * (options.end / options.start) ** progress)
