"""Rules with a learned scale: `lsq`, `lsq_plus` and `power_of_two`."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from qat.functional import lsq_plus_quantize, lsq_quantize, power_of_two_scale, scale_gradient
from qat.functional.tensors import SMALLEST_SCALE, overwrite
from qat.quantizer.base import Quantizer
from qat.quantizer.registry import register_quantizer
from qat.ranges import scale_and_zero_point


@register_quantizer("lsq")
class LSQQuantizer(Quantizer):
    """Learned step size (arXiv:1902.08153); calibration fixes an affine zero point."""

    estimator: ClassVar[str] = "lsq"
    """Name of the computation that kernels may do in its place; see `estimator_of`."""

    def quantize(self, x: Tensor) -> Tensor:
        scale, zero_point = self.grid()
        factor = self.gradient_factor(x)
        if self.zero_point is None:
            return lsq_quantize(x, scale, *self.bounds(), factor)
        return lsq_plus_quantize(x, scale, zero_point, *self.bounds(), factor)


@register_quantizer("lsq_plus")
class LSQPlusQuantizer(Quantizer):
    """Learned step size and zero point, which acts as an integer (arXiv:2004.09576)."""

    zero_point: Tensor

    def check_spec(self) -> None:
        super().check_spec()
        if self.spec.symmetric:
            raise ValueError("lsq_plus learns a zero point and needs symmetric=False; use 'lsq' on a symmetric grid")

    def add_zero_point(self, start: Tensor) -> None:
        self.zero_point = nn.Parameter(start.clone(memory_format=torch.contiguous_format))  # it learns too

    def repair(self) -> None:
        super().repair()
        with torch.no_grad():
            overwrite(self.zero_point, self.finite_zero_point())

    def finite_zero_point(self) -> Tensor:
        """Return the learned zero point; an end of the grid, or 0, if not finite."""
        return torch.nan_to_num(self.zero_point, 0.0, float(self.spec.qmax), float(self.spec.qmin))

    def quantize(self, x: Tensor) -> Tensor:
        """Quantize with both parameters, the zero point at a rate of its own.

        The paper learns the offset -scale * zero_point. For zero_point to follow as that would, its gradient, which
        is scale times as large, needs the factor 1/scale^2: without it an 8-bit zero point never reaches an integer.
        """
        scale, zero_point = self.effective_scale(), self.finite_zero_point()
        if not self.relative_steps:
            zero_point = scale_gradient(zero_point, scale.detach().clamp(min=SMALLEST_SCALE).square().reciprocal())
        return lsq_plus_quantize(x, scale, zero_point, *self.bounds(), self.gradient_factor(x))

    def curves(self) -> dict[str, Tensor]:
        return {**super().curves(), "zero_point": self.finite_zero_point()}

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        zero_point = torch.clamp(torch.round(self.finite_zero_point().detach()), *self.bounds())
        return self.effective_scale(), zero_point


@register_quantizer("power_of_two")
class PowerOfTwoQuantizer(LSQQuantizer):
    """The learned scale acts as the nearest power of two (arXiv:1903.08066).

    The scale's gradient is LSQ's, straight through in the logarithm.
    """

    def effective_scale(self) -> Tensor:
        return power_of_two_scale(super().effective_scale())

    def cover(self, low: Tensor, high: Tensor) -> None:
        # The next power of two that covers the range.
        scale, _ = scale_and_zero_point(low, high, self.spec)
        scale = power_of_two_scale(scale, "up")
        self.set_positive("scale", scale)
        if self.zero_point is not None:
            self.zero_point.copy_(torch.clamp(torch.round(self.spec.qmin - low / scale), *self.bounds()))
