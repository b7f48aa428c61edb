"""Batches of one optimizer step, for gradient accumulation."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

Batch = TypeVar("Batch")


def grouped(batches: Iterable[Batch], count: int) -> Iterator[list[Batch]]:
    """Yield lists of `count` batches, each for one optimizer step.

    The last list has what is left. A step over such a group has the gradient of one batch with all of its images, where
    the loss is

        sum over batches of len(batch) / (images of the group) * mean loss of the batch

    up to what layers compute from a whole batch: the statistics of BatchNorm, and N of `grad_scale="batch"`. So it
    costs the memory of one batch's activations, and `count` batches of inputs, since the shares have to be known before
    the first forward. Time is that of the small batches. Rules that follow ranges (`minmax`, `ema`) follow each batch.

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> model, x, y = torch.nn.Linear(2, 1), torch.randn(5, 2), torch.randn(5, 1)
    >>> for group in grouped(zip(x.split(2), y.split(2)), 3):  # 2, 2 and 1 of them
    ...     for inputs, targets in group:
    ...         share = len(targets) / sum(len(each) for _, each in group)
    ...         (share * mse_loss(model(inputs), targets)).backward()
    >>> whole = torch.autograd.grad(mse_loss(model(x), y), model.weight)[0]
    >>> torch.allclose(model.weight.grad, whole)
    True
    """
    if not count >= 1:
        raise ValueError(f"grouped: count must be at least 1, got {count!r}")
    source = iter(batches)
    return iter(lambda: list(islice(source, count)), [])  # an empty list is the end
