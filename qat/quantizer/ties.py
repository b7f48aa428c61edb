"""`Ties`: averages between two integers of a grid, as a target's kernels round them."""

import torch
from torch import Tensor, nn

from qat.quantizer.base import Quantizer
from qat.targets.profile import TieRule

NUDGE = 2.0**-12
"""Steps: more than float32 errs in an average, less than the distance of the nearest average that is no tie."""


class Ties(nn.Module):
    """Moves averages on ties between two integers to the side that a rule names.

    y = x + scale / 4096 in evaluation, with "away" - scale / 4096 where x / scale + zero_point < 0; x in training, and
    in exports, whose kernels do that themselves. Averages are of up to 2,000 integers.
    """

    def __init__(self, quantizer: Quantizer, rule: TieRule) -> None:
        super().__init__()
        self.read, self.rule = (quantizer,), rule  # no child: the graph has it already

    def forward(self, x: Tensor) -> Tensor:
        """Return the averages, moved."""
        if self.training or torch.compiler.is_exporting() or self.read[0].is_disabled:
            return x
        scale, zero_point = (each.detach() for each in self.read[0].grid())
        return x + (torch.sign(x / scale + zero_point) if self.rule == "away" else 1) * scale * NUDGE
