"""What calibration remembers of a tensor: its extremes, exactly, and a seeded random sample of its values."""

import torch
from torch import Tensor

SAMPLES_PER_BATCH = 16384


class RangeObserver:
    """Collects one activation over the calibration batches.

    Extremes are exact; of the values at most 16,384 a batch are kept, chosen by a generator of the observer's own,
    so that the same batches give the same range, on every rank and whatever else draws random numbers.
    """

    def __init__(self) -> None:
        self._samples: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(0)

    def update(self, x: Tensor) -> None:
        """Take note of one batch of the tensor."""
        values = x.detach().float().reshape(-1)
        if values.numel() == 0:
            return
        extremes = torch.stack([values.amin(), values.amax()])
        if values.numel() > SAMPLES_PER_BATCH:
            chosen = torch.randint(values.numel(), (SAMPLES_PER_BATCH,), generator=self._generator)
            values = values[chosen.to(values.device)]
        self._samples.append(torch.cat([extremes, values]).cpu())

    def values(self) -> Tensor:
        """All that was kept, shape (1, elements), the extremes among it; (1, 0) if nothing was seen."""
        return torch.cat(self._samples)[None] if self._samples else torch.empty(1, 0)
