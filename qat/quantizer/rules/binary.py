"""Rules of one and two bits: `binary`, `ternary` (TWN) and `ttq`."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qat.functional import binary_quantize, sign_ste, ternary_quantize, ttq_quantize
from qat.functional.codebooks.binary import BinaryGradient, binary_scale
from qat.functional.codebooks.ternary import ternary_scale
from qat.functional.sign import error_decay_sign, two_levels
from qat.quantizer.base import Quantizer
from qat.quantizer.granularity import shared_axes
from qat.quantizer.registry import register_quantizer
from qat.ranges import require_finite


class FixedBits(Quantizer):
    """Base of the rules with a single width, signed and symmetric, without even steps."""

    uniform = False
    bits: ClassVar[int]  # the only width; another one in the spec is a ValueError

    def check_spec(self) -> None:
        super().check_spec()
        spec, bits = self.spec, self.bits
        if spec.bits != bits:
            raise ValueError(f"rule {spec.rule!r} has {bits} bit{'s' * (bits > 1)}; set bits={bits}, got {spec.bits}")
        if not (spec.signed and spec.symmetric):
            raise ValueError(f"rule {spec.rule!r} has a sign and no zero point; set signed=True and symmetric=True")


class UnlearnedScale(FixedBits):
    """Base of the rules whose scales follow the values of each call."""

    def add_parameters(self, device: torch.device | str | None) -> None:
        pass

    def fit(self, values: Tensor, elements: int | None = None) -> None:
        require_finite(values)
        self.mark_calibrated()


@dataclass(frozen=True)
class BinaryOptions:
    """Options of `binary`, with the gradient of its sign.

    "clipped" (XNOR-Net), "approximate" (Bi-Real), "error_decay" (IR-Net, annealed) or "straight_through".
    """

    gradient: BinaryGradient = "clipped"


@register_quantizer("binary")
class BinaryQuantizer(FixedBits):
    """Two levels (arXiv:1603.05279): mean magnitudes, or a learned activation scale.

    It has bits=1. A signed activation of one bit is not a rounding to an integer grid with a zero (0 becomes +scale),
    so it is not exportable; weights are.
    """

    bits = 1
    needs_sample = True
    options_type = BinaryOptions
    progress: Tensor

    def check_spec(self) -> None:
        super().check_spec()
        self.exportable = self.role == "weight"

    def add_parameters(self, device: torch.device | str | None) -> None:
        if self.role == "activation":
            self.add_positive("scale", torch.ones(self.shape, device=device))  # weights follow their mean instead
        if self.options.gradient == "error_decay":
            self.register_buffer("progress", torch.zeros((), device=device))

    def quantize(self, x: Tensor) -> Tensor:
        gradient = self.options.gradient
        # A buffer and not a number, so that compiled code reads it anew at every step.
        progress = self.progress if gradient == "error_decay" else None
        if self.role == "weight":
            return binary_quantize(x, self.channel_axis, gradient, progress)
        scale = self.learned("scale", x)
        v = x / scale
        sign = sign_ste(v, gradient) if progress is None else error_decay_sign(v, progress)
        return (sign * scale).to(x.dtype)

    def bounds(self) -> tuple[int, int]:
        return -1, 1

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.role == "activation":
            scale = self.effective_scale()
            return scale, torch.zeros_like(self.scale, requires_grad=False)
        assert x is not None
        scale = binary_scale(x.detach(), self.channel_axis)
        return scale_or_one(scale, x, self.shape), torch.zeros(self.shape, device=x.device)

    def compute_codes(self, x: Tensor) -> Tensor:
        return two_levels(x) if self.role == "activation" else sign_codes(x, self.shape)

    def fit(self, values: Tensor, elements: int | None = None) -> None:
        """Start the scale of an activation at its mean magnitude."""
        require_finite(values)
        if self.role == "activation":
            with torch.no_grad():
                mean = values.abs().mean().to(self.scale.device)
                self.set_positive("scale", torch.where(mean > 0, mean, 1.0))
        self.mark_calibrated()

    def set_progress(self, progress: float) -> None:
        if self.options.gradient == "error_decay":
            self.progress.fill_(progress)


@register_quantizer("ternary")
class TernaryQuantizer(UnlearnedScale):
    """Weights -scale, 0 and scale, bits=2, by thresholds (TWN, arXiv:1605.04711)."""

    bits = 2
    roles = ("weight",)

    def quantize(self, x: Tensor) -> Tensor:
        return ternary_quantize(x, self.channel_axis)

    def bounds(self) -> tuple[int, int]:
        return -1, 1

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert x is not None
        scale, _ = ternary_scale(x.detach(), self.channel_axis)
        return scale_or_one(scale, x, self.shape), torch.zeros(self.shape, device=x.device)

    def compute_codes(self, x: Tensor) -> Tensor:
        _, threshold = ternary_scale(x.detach(), self.channel_axis)
        return torch.where(x.abs() > threshold, torch.sign(x), x * 0)  # NaN * 0 is NaN


@dataclass(frozen=True)
class TTQOptions:
    """Options of `ttq`: the share of the largest magnitude up to which weights are 0."""

    threshold: float = 0.05  # the paper's

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"option 'threshold' must be from 0 to below 1, got {self.threshold!r}")


@register_quantizer("ttq")
class TTQQuantizer(FixedBits):
    """Weights -negative, 0 and positive, both learned (arXiv:1612.01064), bits=2."""

    exportable = False  # two steps of their own: no integer grid
    bits = 2
    roles = ("weight",)
    options_type = TTQOptions
    positive_scale: Tensor
    negative_scale: Tensor

    def add_parameters(self, device: torch.device | str | None) -> None:
        for name in ("positive_scale", "negative_scale"):
            self.add_positive(name, torch.ones(self.shape, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        levels = self.learned("positive_scale", x), self.learned("negative_scale", x)
        return ttq_quantize(x, *levels, self.options.threshold)

    @torch.no_grad()
    def fit(self, values: Tensor, elements: int | None = None) -> None:
        """Start both levels at the mean magnitude of what is kept."""
        require_finite(values)
        size = values.abs()
        kept = size > self.options.threshold * size.amax(1, keepdim=True)
        mean = (size * kept).sum(1) / kept.sum(1).clamp(min=1)
        start = torch.where(mean > 0, mean, 1.0).reshape(self.shape).to(self.calibrated.device)  # 1 for zeros
        self.set_positive("positive_scale", start)
        self.set_positive("negative_scale", start)
        self.mark_calibrated()


def sign_codes(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return sign(x) with sign(0) = 1, but 0 throughout a channel of zeros."""
    return torch.where(_magnitude(x, shape) == 0, 0, two_levels(x))


def scale_or_one(scale: Tensor, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape the scales; that of a channel of zeros, whose codes are 0, becomes 1."""
    return torch.where(_magnitude(x, shape) == 0, 1.0, scale).reshape(shape)


def _magnitude(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.detach().abs().amax(shared_axes(x, shape), keepdim=True)
