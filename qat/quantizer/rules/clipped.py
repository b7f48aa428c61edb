"""PACT and DoReFa as modules: a learned clipping level, and fixed ranges."""

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
    """Options of `pact`: alpha_decay/2 * alpha^2 is added to the loss; the paper's is 2e-4."""

    alpha_decay: float = 2e-4

    def __post_init__(self) -> None:
        if not 0 <= self.alpha_decay < float("inf"):
            raise ValueError(f"option 'alpha_decay' must be at least 0 and finite, got {self.alpha_decay!r}")


@register_quantizer("pact")
class PACTQuantizer(Quantizer):
    """Activations clipped at a learned level alpha (arXiv:1805.06085), on an unsigned grid.

    Deviation: on an affine grid, tensors with negative values (residual branches) are clipped from below too, at
    -alpha * zero_point / (qmax - zero_point), with the zero point of calibration; where there are none it is PACT.
    """

    roles = ("activation",)
    integers_from_bits = True
    options_type = PACTOptions
    alpha: Tensor

    def check_spec(self) -> None:
        """Unsigned grids only."""
        super().check_spec()
        if self.spec.signed:
            raise ValueError("rule 'pact' clips to 0 .. alpha and needs signed=False")

    def add_parameters(self, device: torch.device | str | None) -> None:
        """alpha, and the zero point of an affine grid."""
        self.add_positive("alpha", torch.full(self.shape, UNCALIBRATED_REACH, device=device))
        self.add_zero_point(torch.zeros(self.shape, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        """`pact_quantize`; with a zero point the same with a lower clip."""
        alpha = self.learned("alpha", x).float()
        if self.zero_point is None:
            return pact_quantize(x, alpha, self.spec.bits)
        zero_point = self.zero_point.float()
        above = self.spec.qmax - zero_point
        step = (alpha / above).detach()
        clipped = clamp_ste(widened(x)[0], -(alpha / above) * zero_point, alpha)
        return (round_ste(clipped / step) * step).to(x.dtype)

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Step alpha / (qmax - zero_point), and the zero point; in float32, as `quantize` computes."""
        alpha = self.positive("alpha").float()
        if self.zero_point is None:
            return alpha / self.spec.qmax, torch.zeros_like(alpha, requires_grad=False)
        return alpha / (self.spec.qmax - self.zero_point.float()), self.zero_point.float()

    def cover(self, low: Tensor, high: Tensor) -> None:
        """alpha = high, or what covers low .. high."""
        scale, zero_point = scale_and_zero_point(low, high, self.spec)
        zero_point = zero_point.clamp(max=self.spec.qmax - 1)
        if self.zero_point is not None:
            self.zero_point.copy_(zero_point)
        self.set_positive("alpha", scale * (self.spec.qmax - zero_point))

    def penalty(self) -> Tensor | None:
        """The paper's decay of alpha, without which it only grows."""
        decay: float = self.options.alpha_decay
        return 0.5 * decay * self.alpha.square().sum() if decay else None


@dataclass(frozen=True)
class DoReFaOptions:
    """Options of `dorefa`: whether weights get their size back, the largest |tanh(weight)| of the tensor or channel."""

    rescale: bool = True


@register_quantizer("dorefa")
class DoReFaQuantizer(Quantizer):
    """Weights through tanh onto 2^bits levels from -1 to 1, activations clipped to 0 .. 1 (arXiv:1606.06160).

    There is nothing to learn or to calibrate but the zero point of an affine grid, on which (a deviation) negative
    activations keep the share of the levels that they had. The weights' levels are odd multiples of 1 / (2^bits - 1):
    zero is not one of them, and 8 bits do not fit int8. Deviation: with `rescale` the levels are multiplied by the
    largest |tanh(weight)|, a constant, so that pretrained weights keep their size; else every layer's reach to 1.
    """

    uniform = False
    integers_from_bits = True
    options_type = DoReFaOptions

    def check_spec(self) -> None:
        """Signed and symmetric weights, unsigned activations."""
        super().check_spec()
        spec, weight = self.spec, self.role == "weight"
        if not self.options.rescale and not (weight and spec.bits > 1):
            raise ValueError("rule 'dorefa': option 'rescale' is for weights of 2 bits and more; leave it out")
        if weight and not (spec.signed and spec.symmetric):
            raise ValueError("rule 'dorefa' puts weights on levels from -1 to 1 and needs signed=True, symmetric=True")
        if not weight and spec.signed:
            raise ValueError("rule 'dorefa' clips activations to 0 .. 1 and needs signed=False")

    def add_parameters(self, device: torch.device | str | None) -> None:
        """Nothing but a zero point."""
        self.add_zero_point(torch.zeros(self.shape, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        """`dorefa_quantize_weight`, or the rounding of `dorefa_quantize_activation`."""
        if self.role == "weight":
            if self.spec.bits == 1 or not self.options.rescale:
                return dorefa_quantize_weight(x, self.spec.bits, self.channel_axis)
            return (self.forward_weight(x) * self.reach(x)).to(x.dtype)
        if self.spec.symmetric:
            # The paper's round(x * n) / n, by way of x / (1/n): what QuantizeLinear computes, to the last bit.
            return pact_quantize(x, torch.ones(self.shape, device=x.device), self.spec.bits)
        return fake_quantize(x, *self.grid(), *self.bounds())

    def bounds(self) -> tuple[int, int]:
        """Weights: -(2^bits - 1) .. 2^bits - 1, of which only every second integer is a level."""
        if self.role == "activation":
            return super().bounds()
        levels = 2**self.spec.bits - 1
        return -levels, levels

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Step 1 / (2^bits - 1); of one-bit weights the mean of their magnitudes."""
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
        """Weights: the odd integers 2k - (2^bits - 1)."""
        if self.role == "activation":
            return super().compute_codes(x)
        if self.spec.bits == 1:
            return sign_codes(x, self.shape)
        return torch.round(self.forward_weight(x) * self.bounds()[1])

    def reach(self, x: Tensor) -> Tensor:
        """The largest |tanh(x)| for each scale, dims kept, a constant; 1 where all are zero."""
        size = torch.tanh(widened(x.detach())[0]).abs()
        largest = size.amax(shared_axes(x, self.shape), keepdim=True)
        return torch.where(largest == 0, 1.0, largest)

    def forward_weight(self, x: Tensor) -> Tensor:
        """The weight on its levels, at float32 precision at least."""
        return dorefa_quantize_weight(widened(x)[0], self.spec.bits, self.channel_axis)

    def cover(self, low: Tensor, high: Tensor) -> None:
        """Find the zero point."""
        _, zero_point = scale_and_zero_point(low, high, self.spec)
        if self.zero_point is not None:
            self.zero_point.copy_(zero_point.clamp(max=self.spec.qmax - 1))
