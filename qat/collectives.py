"""Exchange between ranks of torch.distributed; a single process is a group of one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

T = TypeVar("T")

_alone = False  # set by `this_rank_alone`


def rank_count() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _alone else 1


@contextmanager
def this_rank_alone() -> Iterator[None]:
    """Act as a group of one, for checks of one rank: nothing waits for the others."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def rank() -> int:
    """Return the number of this rank, from 0."""
    return dist.get_rank() if rank_count() > 1 else 0


def largest(*mine: int) -> list[int]:
    """Return the maximum over the ranks, for each number; they go through the CPU."""
    if rank_count() == 1:
        return [*mine]
    numbers = torch.tensor(mine)  # on the CPU: a GPU would have to be waited for
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def of_all_ranks(mine: T) -> list[T]:
    """Return the values of all ranks, in rank order."""
    if rank_count() == 1:
        return [mine]
    everyone = [mine] * rank_count()  # overwritten
    dist.all_gather_object(everyone, mine)
    return everyone


def summed(mine: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors of one shape; so is its gradient."""
    total: Tensor = SumFunction.apply(mine) if rank_count() > 1 else mine
    return total


@torch.no_grad()
def take_from_first(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()) if rank_count() > 1 else ():
        dense = tensor.contiguous()
        dist.broadcast(dense, src=0)
        if dense is not tensor:  # a copy, since the tensor is channels_last
            tensor.copy_(dense)


def is_sharded(x: Tensor) -> bool:
    """Return True if every rank holds a part of the tensor."""
    # A DTensor: FSDP2 leaves parameters so outside of their layer's call.
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """Return the tensor, put together if it is sharded; all ranks have to call it."""
    gathered: Tensor = x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]
    return gathered


def reshard(model: nn.Module) -> None:
    """Let FSDP2 drop gathered weights, before parts of them are read or written."""
    for module in model.modules():
        if hasattr(type(module), "reshard"):
            module.reshard()  # type: ignore[operator]


class SumFunction(torch.autograd.Function):
    """Sum over the ranks.

    y = sum of x;  dL/dx = sum of dL/dy over the ranks, where L is the sum of the ranks' losses.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)  # in place
        return total

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return summed(grad.contiguous())
