"""`SoftRounding`: whether each weight is rounded up or down, as a number that learns (AdaRound)."""

import torch
from torch import Tensor, nn

from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.quantizer.granularity import from_groups, to_groups

STRETCH = 0.1
"""The sigmoid is stretched by so much beyond 0 and 1 and clipped there, so that both are reached (zeta = 1.1,
gamma = -0.1 in the paper)."""


class SoftRounding(nn.Module):
    """A weight between the two levels around each of its elements.

        weight = scale * clamp(floor(w / scale) + h, qmin - zero_point, qmax - zero_point)
        h = clamp((1 + 2 * 0.1) * sigmoid(v) - 0.1, 0, 1)

    At first h is the rest of w / scale, and the weight is w, where the grid holds it; a penalty then draws h to 0 or 1.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", arXiv:2004.10568, eqs. 22-24.

    Args:
        layer: a quantized layer with its own weight, calibrated.
    """

    scale: Tensor
    floor: Tensor
    nearest: Tensor

    def __init__(self, layer: QuantLayer) -> None:
        super().__init__()
        self.layer = [layer]  # in a list: its parameters are not those of this module
        quantizer = layer.weight_quantizer
        rows = to_groups(layer.channels_first(layer.weight.detach()), quantizer.spec).float()
        scale, zero_point = (each.detach() for each in quantizer.grid(rows))
        self.low, self.high = (bound - zero_point for bound in quantizer.bounds())
        self.register_buffer("scale", scale)
        self.register_buffer("floor", torch.floor(rows / scale))
        self.register_buffer("nearest", quantizer.compute_codes(rows).detach() - zero_point)
        rest = rows / scale - self.floor
        self.v = nn.Parameter(-torch.log((1 + 2 * STRETCH) / (rest + STRETCH) - 1))

    @staticmethod
    def refusal(quantizer: Quantizer) -> str | None:
        """Why the weights of a quantizer cannot be rounded otherwise, as the end of a sentence; None if they can."""
        own = type(quantizer).compute_codes is not Quantizer.compute_codes
        if own or not quantizer.uniform or not quantizer.exportable:
            return f"since the rule {quantizer.spec.rule!r} finds its integers in a way of its own"
        return "since its quantizer is switched off" if quantizer.passes else None

    def h(self) -> Tensor:
        """How far each element is from the lower level to the upper one, 0 to 1."""
        return torch.clamp(torch.sigmoid(self.v) * (1 + 2 * STRETCH) - STRETCH, 0, 1)

    def forward(self) -> Tensor:
        """The weight, in torch's layout."""
        return self._weight(self.h())

    def _weight(self, h: Tensor) -> Tensor:
        layer = self.layer[0]
        levels = torch.clamp(self.floor + h, self.low, self.high)
        rows = from_groups(levels * self.scale, layer.weight_quantizer.spec)
        return layer.torch_layout(rows).to(layer.weight.dtype)

    def penalty(self, beta: float) -> Tensor:
        """sum(1 - |2 * h - 1|^beta): 0 where every h is 0 or 1."""
        return (1 - (2 * self.h() - 1).abs() ** beta).sum()

    @torch.no_grad()
    def write(self) -> int:
        """Set each element of the layer's weight to the nearer of its two levels; return for how many that is not the
        level to which the weight itself would be rounded."""
        h = (self.h() > 0.5).float()
        self.layer[0].weight.copy_(self._weight(h))
        return int((torch.clamp(self.floor + h, self.low, self.high) != self.nearest).sum())
