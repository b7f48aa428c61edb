"""Rules that clip: `pact` with a learned level, `dorefa` to a fixed range."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qat.functional import clamp_ste, dorefa_quantize_weight, fake_quantize, pact_quantize, round_ste
from qat.functional.codebooks.binary import binary_scale
from qat.functional.tensors import widened
from qat.quantizer.base import UNCALIBRATED_REACH, Quantizer
from qat.quantizer.granularity import shared_axes
from qat.quantizer.registry import register_quantizer
from qat.quantizer.rules.binary import scale_or_one, sign_codes
from qat.ranges import scale_and_zero_point


@dataclass(frozen=True)
class PACTOptions:
    """Options of `pact`: alpha_decay/2 * alpha^2 is added to the loss."""

    alpha_decay: float = 2e-4  # the paper's

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_decay < float("inf"):
            raise ValueError(f"option 'alpha_decay' must be at least 0 and finite, got {self.alpha_decay!r}")


@register_quantizer("pact")
class PACTQuantizer(Quantizer):
    """Activations clipped at a learned level, on an unsigned grid (arXiv:1805.06085).

    Deviation: on an affine grid, tensors with negative values (residual branches) are clipped from below too, at
    -alpha * zero_point / (qmax - zero_point), with the zero point of calibration; where there are none it is PACT.
    """

    roles = ("activation",)
    integers_from_bits = True
    options_type = PACTOptions
    alpha: Tensor

    def check_spec(self) -> None:
        super().check_spec()
        if self.spec.signed:
            raise ValueError("rule 'pact' clips to 0 .. alpha and needs signed=False")

    def add_parameters(self, device: torch.device | str | None) -> None:
        self.add_positive("alpha", torch.full(self.shape, UNCALIBRATED_REACH, device=device))
        self.add_zero_point(torch.zeros(self.shape, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        alpha = self.learned("alpha", x).float()  # as `grid` computes: the exported step is this one
        if self.zero_point is None:
            return pact_quantize(x, alpha, self.spec.bits)
        zero_point = self.zero_point.float()
        above = self.spec.qmax - zero_point
        step = (alpha / above).detach()  # alpha learns by the clip alone, as in PACT
        clipped = clamp_ste(widened(x)[0], -(alpha / above) * zero_point, alpha)
        return (round_ste(clipped / step) * step).to(x.dtype)

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        alpha = self.positive("alpha").float()
        if self.zero_point is None:
            return alpha / self.spec.qmax, torch.zeros_like(alpha, requires_grad=False)
        return alpha / (self.spec.qmax - self.zero_point.float()), self.zero_point.float()

    def cover(self, low: Tensor, high: Tensor) -> None:
        scale, zero_point = scale_and_zero_point(low, high, self.spec)
        zero_point = zero_point.clamp(max=self.spec.qmax - 1)  # room for alpha above it
        if self.zero_point is not None:
            self.zero_point.copy_(zero_point)
        self.set_positive("alpha", scale * (self.spec.qmax - zero_point))

    def penalty(self) -> Tensor | None:
        """Return the paper's decay of alpha, without which it only grows."""
        decay: float = self.options.alpha_decay
        return 0.5 * decay * self.alpha.square().sum() if decay else None


@dataclass(frozen=True)
class DoReFaOptions:
    """Options of `dorefa`: rescale gives weights their size back."""

    rescale: bool = True  # by the largest |tanh(weight)| of the tensor or channel


@register_quantizer("dorefa")
class DoReFaQuantizer(Quantizer):
    """Weights through tanh onto -1 .. 1, activations onto 0 .. 1 (arXiv:1606.06160).

    Both have 2^bits levels. There is nothing to learn or to calibrate but the zero point of an affine grid, on which (a
    deviation) negative activations keep the share of the levels that they had. The weights' levels are odd multiples of
    1 / (2^bits - 1): zero is not one of them, and 8 bits do not fit int8. Deviation: with `rescale` the levels are
    multiplied by the largest |tanh(weight)|, a constant, so that pretrained weights keep their size; else every layer's
    reach to 1.
    """

    uniform = False
    integers_from_bits = True
    options_type = DoReFaOptions

    def check_spec(self) -> None:
        super().check_spec()
        spec, weight = self.spec, self.role == "weight"
        if not self.options.rescale and not (weight and spec.bits > 1):
            raise ValueError("rule 'dorefa': option 'rescale' is for weights of 2 bits and more; leave it out")
        if weight and not (spec.signed and spec.symmetric):
            raise ValueError("rule 'dorefa' puts weights on levels from -1 to 1 and needs signed=True, symmetric=True")
        if not weight and spec.signed:
            raise ValueError("rule 'dorefa' clips activations to 0 .. 1 and needs signed=False")

    def add_parameters(self, device: torch.device | str | None) -> None:
        self.add_zero_point(torch.zeros(self.shape, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        if self.role == "weight":
            if self.spec.bits == 1 or not self.options.rescale:
                return dorefa_quantize_weight(x, self.spec.bits, self.channel_axis)
            return (self.forward_weight(x) * self.reach(x)).to(x.dtype)
        if self.spec.symmetric:
            # The paper's round(x * n) / n, by way of x / (1/n): what QuantizeLinear computes, to the last bit.
            return pact_quantize(x, torch.ones(self.shape, device=x.device), self.spec.bits)
        return fake_quantize(x, *self.grid(), *self.bounds())

    def bounds(self) -> tuple[int, int]:
        if self.role == "activation":
            return super().bounds()
        levels = 2**self.spec.bits - 1  # of these integers only every second one is a level
        return -levels, levels

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        zero_point = torch.zeros(self.shape, device=self.calibrated.device)
        if self.role == "activation":
            zero_point = zero_point if self.zero_point is None else self.zero_point
            return 1.0 / (self.spec.qmax - zero_point), zero_point
        if self.spec.bits > 1:
            assert x is not None or not self.options.rescale
            reach = self.reach(x).reshape(self.shape) if x is not None and self.options.rescale else 1.0 + zero_point
            return reach / self.bounds()[1], zero_point
        assert x is not None
        return scale_or_one(binary_scale(x.detach(), self.channel_axis), x, self.shape), zero_point

    def compute_codes(self, x: Tensor) -> Tensor:
        if self.role == "activation":
            return super().compute_codes(x)
        if self.spec.bits == 1:
            return sign_codes(x, self.shape)
        return torch.round(self.forward_weight(x) * self.bounds()[1])

    def reach(self, x: Tensor) -> Tensor:
        """Return the largest |tanh(x)| for each scale, dims kept, a constant; 1 for zeros."""
        size = torch.tanh(widened(x.detach())[0]).abs()
        largest = size.amax(shared_axes(x, self.shape), keepdim=True)
        return torch.where(largest == 0, 1.0, largest)

    def forward_weight(self, x: Tensor) -> Tensor:
        """Return the weight on its levels, in float32 at least."""
        return dorefa_quantize_weight(widened(x)[0], self.spec.bits, self.channel_axis)

    def cover(self, low: Tensor, high: Tensor) -> None:
        _, zero_point = scale_and_zero_point(low, high, self.spec)
        if self.zero_point is not None:
            self.zero_point.copy_(zero_point.clamp(max=self.spec.qmax - 1))
