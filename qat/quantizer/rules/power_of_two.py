"""LSQ on scales that are powers of two, which hardware multiplies by shifting."""

import torch
from torch import Tensor

from qat.functional import power_of_two_scale
from qat.quantizer.registry import register_quantizer
from qat.quantizer.rules.lsq import LSQQuantizer
from qat.ranges import scale_and_zero_point


@register_quantizer("power_of_two")
class PowerOfTwoQuantizer(LSQQuantizer):
    """The learned scale acts as the nearest power of two (arXiv:1903.08066, with LSQ's gradient for the scale)."""

    def effective_scale(self) -> Tensor:
        """2^round(log2(scale)), its gradient straight through in the logarithm."""
        return power_of_two_scale(super().effective_scale())

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Cover low .. high: the next power of two that does."""
        low, high = self.checked_range(low, high)
        scale, _ = scale_and_zero_point(low, high, self.spec)
        scale = power_of_two_scale(scale, "up")
        self.set_positive("scale", scale)
        if self.zero_point is not None:
            self.zero_point.copy_(torch.clamp(torch.round(self.spec.qmin - low / scale), *self.bounds()))
        self.mark_calibrated()
