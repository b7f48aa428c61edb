"""The rule `learned_bits`, which learns the width of a tensor against a cost."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from qat.functional import bit_cost, clamp_ste, learned_bits_quantize, round_ste
from qat.functional.tensors import overwrite, widened
from qat.quantizer.base import UNCALIBRATED_REACH, Quantizer
from qat.quantizer.registry import register_quantizer


@dataclass(frozen=True)
class LearnedBitsOptions:
    """Options of `learned_bits`.

    Attributes:
        least: fewest bits, from 1 (unsigned) or 2 (signed); the most are the spec's bits, which it starts from.
        cost: what a million bits of the tensor add to the loss, of a weight as it is stored, of an activation for one
            sample. Without a cost nothing drives the bits down.
    """

    least: int = 2
    cost: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.least <= 16:
            raise ValueError(f"option 'least' must be from 1 to 16, got {self.least!r}")
        if not 0 <= self.cost < float("inf"):
            raise ValueError(f"option 'cost' must be at least 0 and finite, got {self.cost!r}")


@register_quantizer("learned_bits")
class LearnedBitsQuantizer(Quantizer):
    """Learned range and whole number of bits (arXiv:1905.11452), on an integer grid.

    The sum of `cost` over a model is in `qat.penalty(model)`, which the trainer adds to the loss.
    """

    integers_from_bits = True
    drawn = ("bits",)
    lr_factors: ClassVar[dict[str, float]] = {"bits": 100.0}
    options_type = LearnedBitsOptions
    reach: Tensor
    bits: Tensor
    elements: Tensor

    def check_spec(self) -> None:
        super().check_spec()
        spec = self.spec
        if not spec.symmetric:
            raise ValueError("rule 'learned_bits' has no zero point and needs symmetric=True")
        self.least = max(self.options.least, 1 + int(spec.signed))
        if self.least > spec.bits:
            raise ValueError(
                f"rule 'learned_bits': option 'least' is {self.least}, more than the {spec.bits} bits of the spec"
            )

    def add_parameters(self, device: torch.device | str | None) -> None:
        self.add_positive("reach", torch.full(self.shape, UNCALIBRATED_REACH, device=device))
        self.bits = nn.Parameter(torch.tensor(float(self.spec.bits), device=device))
        self.register_buffer("elements", torch.zeros((), dtype=torch.int64, device=device))  # half() leaves it alone

    def effective_bits(self) -> Tensor:
        """Return the learned width within its limits, not yet rounded."""
        bits = torch.where(self.bits.isnan(), float(self.spec.bits), self.bits).float()
        return clamp_ste(bits, float(self.least), float(self.spec.bits))

    def quantize(self, x: Tensor) -> Tensor:
        # The width's gradient has no factor: it weighs against that of `penalty`.
        return learned_bits_quantize(x, self.learned("reach", x).float(), self.effective_bits(), self.spec.signed)

    def highest(self) -> Tensor:
        """Return the highest integer in force as a tensor, without synchronisation."""
        return torch.exp2(torch.round(self.effective_bits().detach()) - int(self.spec.signed)) - 1

    def bounds(self) -> tuple[int, int]:
        high = int(self.highest())
        return (-high if self.spec.signed else 0), high

    def span(self) -> Tensor:
        return self.highest() * (1 + int(self.spec.signed))

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        reach = self.positive("reach").float()
        return reach / self.highest(), torch.zeros_like(reach, requires_grad=False)

    def compute_codes(self, x: Tensor) -> Tensor:
        high = self.highest()  # not `bounds()`, which would wait for the device
        low = -high if self.spec.signed else torch.zeros_like(high)
        return torch.clamp(round_ste(widened(x)[0] / self.grid()[0]), low, high)

    def fit(self, values: Tensor, elements: int | None = None) -> None:
        super().fit(values, elements)
        # Of the tensor, for the cost: `values` may be a sample of it.
        self.elements.fill_(values.numel() if elements is None else elements)

    def cover(self, low: Tensor, high: Tensor) -> None:
        reach = torch.maximum(-low, high) if self.spec.signed else high
        self.set_positive("reach", torch.where(reach > 0, reach, 1.0))

    @torch.no_grad()
    def repair(self) -> None:
        super().repair()
        most = float(self.spec.bits)
        # In the limits a width still has a gradient.
        overwrite(self.bits, torch.nan_to_num(self.bits, most).clamp(float(self.least), most))

    def penalty(self) -> Tensor | None:
        """Return cost * bits * elements / 10^6."""
        cost: float = self.options.cost
        return bit_cost(self.effective_bits(), 1) * self.elements * (cost * 1e-6) if cost else None

    def describe(self) -> str:
        if self.bits.is_meta:  # no value to show
            return super().describe()
        return f"{self.spec}, {int(torch.round(self.effective_bits()))} bits in force"
