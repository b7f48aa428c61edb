"""Rules with uneven levels (`apot`) or uneven thresholds (`n2uq`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qat.functional import apot_quantize, n2uq_quantize, normalize_weight, scale_gradient
from qat.functional.codebooks.apot import MOST_MAGNITUDE_BITS, SMALLEST_DEVIATION
from qat.functional.tensors import overwrite, widened
from qat.quantizer.base import UNCALIBRATED_REACH, Quantizer
from qat.quantizer.registry import register_quantizer
from qat.ranges import initial_range, scale_and_zero_point


@dataclass(frozen=True)
class APoTOptions:
    """Options of `apot`: normalize weights before the rounding, as the paper does.

    Use it from the start of a training: a trained model loses what the means of its weights carry.
    """

    normalize: bool = False


@register_quantizer("apot")
class APoTQuantizer(Quantizer):
    """Additive powers of two with a learned clipping level (arXiv:1909.13144).

    Its levels lie on no integer grid. Deviation: normalised weights are multiplied by their deviation again, so that
    layers without a BatchNorm behind them keep their size.
    """

    exportable = False
    uniform = False
    integers_from_bits = True
    options_type = APoTOptions
    alpha: Tensor

    def check_spec(self) -> None:
        super().check_spec()
        spec = self.spec
        if not spec.symmetric:
            raise ValueError("rule 'apot' has levels around 0 and needs symmetric=True")
        if self.role == "activation" and self.options.normalize:
            raise ValueError("rule 'apot': option 'normalize' is for weights; leave it out for activations")
        if not 1 <= spec.bits - int(spec.signed) <= MOST_MAGNITUDE_BITS:
            least, most = 1 + int(spec.signed), MOST_MAGNITUDE_BITS + int(spec.signed)
            raise ValueError(f"rule 'apot' has {least} to {most} bits with signed={spec.signed}, got bits={spec.bits}")

    def add_parameters(self, device: torch.device | str | None) -> None:
        self.add_positive("alpha", torch.full(self.shape, UNCALIBRATED_REACH, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        alpha, spec = self.learned("alpha", x), self.spec
        if not self.options.normalize:
            return apot_quantize(x, alpha, spec.bits, spec.signed)
        (wide,) = widened(x)
        normal = apot_quantize(normalize_weight(wide, self.channel_axis), alpha, spec.bits, spec.signed)
        return (normal * self._deviation(wide.detach())).to(x.dtype)

    def fit(self, values: Tensor, elements: int | None = None) -> None:
        if self.options.normalize:
            initial_range(values, self.spec)  # refuses NaN before the normalisation hides where it came from
            values = normalize_weight(values.detach().float(), 0)
        super().fit(values, elements)

    def cover(self, low: Tensor, high: Tensor) -> None:
        reach = torch.maximum(-low, high)
        self.set_positive("alpha", torch.where(reach > 0, reach, 1.0))

    def _deviation(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, -1) if not self.shape else x.reshape(self.alpha.numel(), -1)
        return rows.std(1, correction=0).clamp(min=SMALLEST_DEVIATION).reshape(self.shape)


@register_quantizer("n2uq")
class N2UQQuantizer(Quantizer):
    """Learned thresholds, evenly spaced levels (arXiv:2111.14826).

    Weights are deployed as integers; for activations the runtime would have to know the thresholds, which
    QuantizeLinear cannot express, so they are not exportable. The levels' step is learned too, all three with LSQ's
    gradient factor (the paper trains them with a learning rate of their own).
    """

    uniform = False
    drawn = ("start",)
    start: Tensor
    widths: Tensor
    step: Tensor

    def check_spec(self) -> None:
        super().check_spec()
        spec = self.spec
        if not spec.symmetric or spec.granularity != "tensor":
            raise ValueError("rule 'n2uq' needs symmetric=True and granularity='tensor'")
        if spec.bits > 8 or spec.qmax < 1:
            raise ValueError(f"rule 'n2uq' learns a width per level and takes at most 8 bits, got bits={spec.bits}")
        self.exportable = self.role == "weight"  # QuantizeLinear cannot express thresholds

    def bounds(self) -> tuple[int, int]:
        return (-self.spec.qmax if self.spec.signed else 0), self.spec.qmax  # a mirror image around zero if signed

    def add_parameters(self, device: torch.device | str | None) -> None:
        low, high = self.bounds()
        step = torch.tensor(UNCALIBRATED_REACH / high, device=device)
        self.start = torch.nn.Parameter(step * low)  # may be negative or 0
        self.add_positive("widths", step.expand(high - low).clone())
        self.add_positive("step", step)

    def quantize(self, x: Tensor) -> Tensor:
        start = scale_gradient(self.finite_start(), self.gradient_factor(x))
        return n2uq_quantize(x, start, self.learned("widths", x), self.learned("step", x), self.bounds()[0])

    def finite_start(self) -> Tensor:
        """Return the start of the first segment, at the lowest level if not finite."""
        lowest = self.positive("step").detach() * self.bounds()[0]
        return torch.where(self.start.isfinite(), self.start, lowest)

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.positive("step"), torch.zeros_like(self.step, requires_grad=False)

    def compute_codes(self, x: Tensor) -> Tensor:
        (wide,) = widened(x)
        one = torch.ones_like(self.step, requires_grad=False)  # levels in units of the step are the integers
        return n2uq_quantize(wide, self.finite_start(), self.positive("widths"), one, self.bounds()[0])

    def cover(self, low: Tensor, high: Tensor) -> None:
        # Even thresholds at the middle between levels: the training starts from rounding.
        scale, _ = scale_and_zero_point(low, high, self.spec)
        self.start.copy_(scale * self.bounds()[0])
        self.set_positive("widths", scale.expand_as(self.widths))
        self.set_positive("step", scale)

    def repair(self) -> None:
        super().repair()
        with torch.no_grad():
            overwrite(self.start, self.finite_start())
