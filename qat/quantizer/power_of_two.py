"""LSQ on scales that are powers of two, which hardware multiplies by shifting."""

from torch import Tensor

from qat.functional import power_of_two_scale
from qat.quantizer.lsq import LSQQuantizer
from qat.quantizer.registry import register_quantizer


@register_quantizer("power_of_two")
class PowerOfTwoQuantizer(LSQQuantizer):
    """The learned scale acts as the nearest power of two (arXiv:1903.08066, with LSQ's gradient for the scale)."""

    def effective_scale(self) -> Tensor:
        """2^round(log2(scale)), its gradient straight through in the logarithm."""
        return power_of_two_scale(super().effective_scale())
