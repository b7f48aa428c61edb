"""`TiesAwayFromZero`: averages as kernels round them that take ties away from zero."""

import torch
from torch import Tensor, nn

from qat.quantizer.base import Quantizer

NUDGE = 2.0**-12
"""Steps: more than float32 errs in an average, less than the distance of the nearest average that is no tie."""


class TiesAwayFromZero(nn.Module):
    """Moves averages on ties between two integers of a grid to the side away from integer 0.

    y = x + sign(x / scale + zero_point) * scale / 4096 in evaluation; x in training and in exports, whose kernels do
    that themselves. It stands between an average of up to 2,000 integers and the quantizer of its grid, which rounds to
    the nearest.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.read = (quantizer,)  # no child: the graph has it already

    def forward(self, x: Tensor) -> Tensor:
        """Return the averages, moved."""
        if self.training or torch.compiler.is_exporting() or self.read[0].is_disabled:
            return x
        scale, zero_point = (each.detach() for each in self.read[0].grid())
        return x + torch.sign(x / scale + zero_point) * scale * NUDGE
