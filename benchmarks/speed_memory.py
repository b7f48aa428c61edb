"""Memory of a training step: the bytes that the forward keeps for the backward."""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

DEEPEST = 4
"""How far into objects that a Function keeps on its ctx is looked for tensors."""


def saved_bytes(forward: Callable[[], Tensor], left_out: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages that are kept for the backward after `forward` has returned the loss.

    Counted are tensors saved by torch's own operations and with `save_for_backward`, and tensors that a Function keeps
    as attributes of its ctx. A storage counts once and whole, however many views of it are saved.

    Args:
        forward: returns a tensor with a graph. Its graph is freed afterwards.
        left_out: tensors that are there anyway, such as the parameters.
    """
    packed: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        alias = tensor.detach()
        packed.append(weakref.ref(alias))  # what is freed before the forward ends is not counted
        return alias

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda alias: alias):
        loss = forward()
    kept = [tensor for reference in packed if (tensor := reference()) is not None]
    kept += [tensor for node in nodes(loss.grad_fn) for tensor in kept_on(node)]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    for tensor in left_out:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def nodes(root: Any) -> Iterator[Any]:
    """Every node of an autograd graph."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        waiting += fresh


def kept_on(node: Any) -> Iterator[Tensor]:
    """Tensors that a Function written in Python keeps on its ctx, which is the node, past `save_for_backward`."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        yield from _tensors(vars(node), DEEPEST)


def _tensors(value: Any, deep: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif deep == 0 or isinstance(value, (type, types.ModuleType)):
        return
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item, deep - 1)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()), deep)
    elif isinstance(value, functools.partial):
        yield from _tensors([*value.args, *value.keywords.values()], deep)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                yield from _tensors(cell.cell_contents, deep - 1)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), deep - 1)
