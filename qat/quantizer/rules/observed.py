"""Rules that observe their range: `minmax` and `ema`. Only x gets a gradient."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qat.collectives import rank_count
from qat.functional import fake_quantize
from qat.quantizer.base import UNCALIBRATED_REACH, Quantizer
from qat.quantizer.granularity import shared_axes
from qat.quantizer.registry import register_quantizer
from qat.ranges import scale_and_zero_point


class ObservedQuantizer(Quantizer):
    """Base of both: keeps low and high in buffers.

    Ranges follow the data in train() only, so validation data leaks into nothing. Under torch.distributed they follow
    the data of all ranks. Under `torch.utils.checkpoint` the recomputation counts a batch twice, which an `ema`
    notices.
    """

    drawn = ("low", "high")
    low: Tensor
    high: Tensor

    def add_parameters(self, device: torch.device | str | None) -> None:
        low = -UNCALIBRATED_REACH if self.spec.signed or not self.spec.symmetric else 0.0
        self.register_buffer("low", torch.full(self.shape, low, device=device))
        self.register_buffer("high", torch.full(self.shape, UNCALIBRATED_REACH, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        scale, zero_point = self.grid(x)
        return fake_quantize(x, scale, zero_point, *self.bounds())

    @torch.no_grad()
    def follow(self, x: Tensor) -> None:
        low, high = self.extremes(x) if x.numel() else (self.low.float(), self.high.float())
        if self.role == "activation" and rank_count() > 1:  # weights are the same on every rank
            both = torch.stack([-low, high])  # one reduction finds both
            dist.all_reduce(both, dist.ReduceOp.MAX)
            low, high = -both[0], both[1]
        self.absorb(low, high)

    def absorb(self, low: Tensor, high: Tensor) -> None:
        """Take a batch's extremes into the range."""
        raise TypeError(f"{type(self).__name__}: an observed quantizer must implement absorb(low, high)")

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the extremes of x for each scale, zero included.

        Where x has NaN or infinity, they are those in force.
        """
        shared = shared_axes(x, self.shape)
        wide = x.float()
        low, high = wide.amin(shared).reshape(self.shape), wide.amax(shared).reshape(self.shape)
        finite = low.isfinite() & high.isfinite()
        return torch.where(finite, low.clamp(max=0), self.low), torch.where(finite, high.clamp(min=0), self.high)

    @torch.no_grad()
    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # New tensors, because the buffers move on while a graph still needs these.
        return scale_and_zero_point(self.low, self.high, self.spec)

    def cover(self, low: Tensor, high: Tensor) -> None:
        self.low.copy_(low)
        self.high.copy_(high)


@register_quantizer("minmax")
class MinMaxQuantizer(ObservedQuantizer):
    """Range from the lowest to the highest value (arXiv:1712.05877).

    The range of a weight is that of its present values, that of an activation of all values ever seen.
    """

    def check_spec(self) -> None:
        super().check_spec()
        if self.role == "weight" and self.spec.init != "minmax":
            raise ValueError(
                f"rule 'minmax' finds a weight's range anew at every step: init={self.spec.init!r} has no effect; use"
                " init='minmax'"
            )

    def absorb(self, low: Tensor, high: Tensor) -> None:
        if self.role == "activation":
            low, high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.cover(low, high)

    @torch.no_grad()
    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.role == "weight" and not self.is_frozen and x is not None and x.numel():  # nothing has no extremes
            return scale_and_zero_point(*self.extremes(x), self.spec)
        return super().grid()


@dataclass(frozen=True)
class EMAOptions:
    """Options of `ema`: the share of the newest batch, above 0 and at most 1."""

    momentum: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise ValueError(f"option 'momentum' must be above 0 and at most 1, got {self.momentum!r}")


@register_quantizer("ema")
class EMAQuantizer(ObservedQuantizer):
    """Moving averages of the lowest and highest values of batches (arXiv:1712.05877)."""

    options_type = EMAOptions

    def absorb(self, low: Tensor, high: Tensor) -> None:
        momentum = self.options.momentum
        self.low.copy_(torch.lerp(self.low.to(low.dtype), low, momentum))
        self.high.copy_(torch.lerp(self.high.to(high.dtype), high, momentum))
