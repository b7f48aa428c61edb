"""Statistics of a tensor for calibration: exact extremes, and a seeded sample."""

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

SAMPLES_PER_BATCH = 16384


class RangeObserver:
    """Collects one activation over the calibration batches.

    Extremes are exact; of the values at most 16,384 a batch are kept, chosen by a generator of the observer's own,
    so that the same batches give the same range, on every rank and whatever else draws random numbers.
    The observers of one model share `turns`: each takes the next one when it first sees a value.
    """

    def __init__(self, turns: Iterator[int] | None = None) -> None:
        self.elements = 0  # of one sample of the tensor (all of it, if it has one axis only)
        self.turn = sys.maxsize  # as long as it has seen nothing
        self._turns = itertools.count() if turns is None else turns
        self._samples: list[Tensor] = []
        self._extremes: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)

    def update(self, x: Tensor) -> None:
        """Record one batch of the tensor."""
        values = x.detach().float().reshape(-1)
        if values.numel() == 0:
            return
        if not self._extremes:
            self.turn = next(self._turns)
        self.elements = values.numel() // x.shape[0] if x.dim() > 1 else values.numel()
        self._extremes.append(torch.stack([values.amin(), values.amax()]).cpu())
        if values.numel() > SAMPLES_PER_BATCH:
            chosen = torch.randint(values.numel(), (SAMPLES_PER_BATCH,), generator=self._generator)
            values = values[chosen.to(values.device)]
        # A copy: the model may go on to write into the tensor.
        self._samples.append(values.to("cpu", copy=True))

    def values(self, extremes: bool = False) -> Tensor:
        """Return the sample, or each batch's extremes, as (1, n); (1, 0) of no values."""
        # Extremes that are NaN or infinite are put into the sample; others would fill the tail of a percentile.
        kept = self._extremes if extremes else [*self._samples, *(e for e in self._extremes if not e.isfinite().all())]
        return torch.cat(kept)[None] if kept else torch.empty(1, 0)
