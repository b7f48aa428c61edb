"""The model whose gradients are the means over all ranks: torch's DistributedDataParallel."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qat.collectives import largest, rank_count
from qat.training.loop.trial import trial_step

SYNC_BUFFERS = next(
    name for name in ("forward_sync_buffers", "broadcast_buffers")  # the second is its older name, as in torch 2.11
    if name in inspect.signature(DistributedDataParallel).parameters
)  # fmt: skip

ONE_BUCKET = 2**20
"""Megabytes, more than any model's gradients have."""


def averaged(model: nn.Module, loss_of: Callable[[Callable[[Tensor], Any]], Tensor]) -> nn.Module:
    """What a step calls so that its backward leaves the means of all ranks' gradients: the model itself on one rank.

    A trial step with `loss_of`, a loss through what it is given, finds parameters without a gradient.
    """
    if rank_count() == 1:
        return model
    learning = {name for name, each in model.named_parameters() if each.requires_grad}
    [unused] = largest(bool(learning - trial_step(model, model, loss_of).learning))
    # Each rank has BatchNorm statistics of its own in training; evaluations and checkpoints are of rank 0's.
    more: dict[str, Any] = {SYNC_BUFFERS: False, "find_unused_parameters": bool(unused)}
    if next(model.parameters()).device.type == "cpu":
        more["bucket_cap_mb"] = ONE_BUCKET  # sums beside the backward would take its processor away
    ddp = DistributedDataParallel(model, **more)
    # After its first backward it sorts the gradients into other buckets, in which sums round otherwise. A resumed run
    # has to add as the first one did: in both, that backward is a trial's.
    trial_step(model, ddp, loss_of)
    return ddp
