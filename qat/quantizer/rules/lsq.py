"""The LSQ family as modules: a learned scale, in LSQ+ a learned zero point too, and scales that are powers of two."""

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
    """Learned step size (arXiv:1902.08153); on an affine grid the zero point is an integer fixed by calibration."""

    estimator: ClassVar[str] = "lsq"
    """What kernels may compute in its place; see `estimator_of`."""

    def quantize(self, x: Tensor) -> Tensor:
        """`lsq_quantize`, or its affine form with a zero point that does not learn."""
        scale, zero_point = self.grid()
        factor = self.gradient_factor(x)
        if self.zero_point is None:
            return lsq_quantize(x, scale, *self.bounds(), factor)
        return lsq_plus_quantize(x, scale, zero_point, *self.bounds(), factor)


@register_quantizer("lsq_plus")
class LSQPlusQuantizer(Quantizer):
    """Learned step size and zero point (arXiv:2004.09576); the zero point acts as an integer of the grid."""

    def check_spec(self) -> None:
        """Affine grids only."""
        super().check_spec()
        if self.spec.symmetric:
            raise ValueError("lsq_plus learns a zero point and needs symmetric=False; use 'lsq' on a symmetric grid")

    def add_parameters(self, device: torch.device | str | None) -> None:
        """The zero point is a parameter too."""
        super().add_parameters(device)
        start = self.zero_point
        assert start is not None
        del self.zero_point
        self.zero_point = nn.Parameter(start)

    def repair(self) -> None:
        """A zero point that became NaN or infinite goes back to the nearest end of the grid, or 0."""
        super().repair()
        assert self.zero_point is not None
        with torch.no_grad():
            overwrite(self.zero_point, self.finite_zero_point())

    def finite_zero_point(self) -> Tensor:
        """The learned zero point, an end of the grid or 0 where it is not finite."""
        assert self.zero_point is not None
        return torch.nan_to_num(self.zero_point, 0.0, float(self.spec.qmax), float(self.spec.qmin))

    def quantize(self, x: Tensor) -> Tensor:
        """`lsq_plus_quantize` with both parameters.

        The paper learns the offset -scale * zero_point. For zero_point to follow as that would, its gradient, which
        is scale times as large, needs the factor 1/scale^2: without it an 8-bit zero point never reaches an integer.
        """
        scale, zero_point = self.effective_scale(), self.finite_zero_point()
        if not self.relative_steps:
            zero_point = scale_gradient(zero_point, scale.detach().clamp(min=SMALLEST_SCALE).square().reciprocal())
        return lsq_plus_quantize(x, scale, zero_point, *self.bounds(), self.gradient_factor(x))

    def curves(self) -> dict[str, Tensor]:
        """The zero point too."""
        return {**super().curves(), "zero_point": self.finite_zero_point()}

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scale, and the integer that the learned zero point acts as."""
        zero_point = torch.clamp(torch.round(self.finite_zero_point().detach()), *self.bounds())
        return self.effective_scale(), zero_point


@register_quantizer("power_of_two")
class PowerOfTwoQuantizer(LSQQuantizer):
    """The learned scale acts as the nearest power of two (arXiv:1903.08066, with LSQ's gradient for the scale)."""

    def effective_scale(self) -> Tensor:
        """2^round(log2(scale)), its gradient straight through in the logarithm."""
        return power_of_two_scale(super().effective_scale())

    def cover(self, low: Tensor, high: Tensor) -> None:
        """Cover low .. high: the next power of two that does."""
        scale, _ = scale_and_zero_point(low, high, self.spec)
        scale = power_of_two_scale(scale, "up")
        self.set_positive("scale", scale)
        if self.zero_point is not None:
            self.zero_point.copy_(torch.clamp(torch.round(self.spec.qmin - low / scale), *self.bounds()))
