"""The LSQ family as modules: a learned scale, and in LSQ+ a learned zero point too."""

import torch
from torch import Tensor, nn

from qat.functional import lsq_plus_quantize, lsq_quantize
from qat.quantizer.base import Quantizer, Role
from qat.quantizer.registry import register_quantizer
from qat.spec import QuantSpec


@register_quantizer("lsq")
class LSQQuantizer(Quantizer):
    """Learned step size (arXiv:1902.08153); on an affine grid the zero point is an integer fixed by calibration."""

    def quantize(self, x: Tensor) -> Tensor:
        """`lsq_quantize`, or its affine form with a zero point that does not learn."""
        scale, zero_point = self.grid()
        factor = self.gradient_factor(x)
        if self.spec.symmetric:
            return lsq_quantize(x, scale, self.spec.qmin, self.spec.qmax, factor)
        return lsq_plus_quantize(x, scale, zero_point, self.spec.qmin, self.spec.qmax, factor)


@register_quantizer("lsq_plus")
class LSQPlusQuantizer(Quantizer):
    """Learned step size and zero point (arXiv:2004.09576); the zero point acts as an integer of the grid.

    Raises:
        ValueError: on a symmetric grid, which has no zero point to learn.
    """

    def __init__(
        self,
        spec: QuantSpec,
        role: Role = "activation",
        shape: tuple[int, ...] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(spec, role, shape, device)
        if spec.symmetric:
            raise ValueError("lsq_plus learns a zero point and needs symmetric=False; use 'lsq' on a symmetric grid")
        start = self.zero_point
        del self.zero_point
        self.zero_point = nn.Parameter(start)

    def quantize(self, x: Tensor) -> Tensor:
        """`lsq_plus_quantize` with both parameters."""
        spec = self.spec
        return lsq_plus_quantize(
            x, self.effective_scale(), self.zero_point, spec.qmin, spec.qmax, self.gradient_factor(x)
        )

    def grid(self) -> tuple[Tensor, Tensor]:
        """Scale, and the integer that the learned zero point acts as."""
        zero_point = torch.clamp(torch.round(self.zero_point.detach()), self.spec.qmin, self.spec.qmax)
        return self.effective_scale(), zero_point
