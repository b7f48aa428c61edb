"""Each rank's share of every batch: the ranks together read what one process would, and no image twice."""

from collections.abc import Iterator, Sized
from typing import Protocol, TypeVar

from torch.utils.data import Sampler

from qat.collectives import rank, rank_count

Key = TypeVar("Key", covariant=True)


class Ordered(Sized, Protocol[Key]):
    """An order of images."""

    def __iter__(self) -> Iterator[Key]: ...


class RankBatches(Sampler[list[Key]]):
    """Batches of `size` images of an order, of each this rank's share: its images rank*n/count to (rank+1)*n/count.

    With `whole`, an incomplete last batch is left out, unless it is the only one, and all shares are of one size: a
    gradient is the mean over the ranks. With `alone`, all of a batch is rank 0's share.
    """

    def __init__(self, order: Ordered[Key], size: int, whole: bool = False, alone: bool = False) -> None:
        self.order, self.size, self.whole, self.alone = order, size, whole, alone
        self.first = 0
        """The batch that a pass begins with: a resumed epoch has trained on those before it."""

    def __len__(self) -> int:
        batches, left = divmod(len(self.order), self.size)
        return max(batches, min(left // rank_count(), 1)) if self.whole else batches + bool(left)

    def __iter__(self) -> Iterator[list[Key]]:
        keys, count = list(self.order), 1 if self.alone else rank_count()
        for number in range(self.first, len(self)):
            batch = keys[number * self.size : (number + 1) * self.size]
            if self.whole:
                batch = batch[: len(batch) // count * count]
            share = batch[rank() * len(batch) // count : (rank() + 1) * len(batch) // count]
            if share:  # the last batch may have fewer images than there are ranks
                yield share
