"""Memory of a training step: the bytes that the forward keeps for the backward, and how far a step's memory rises.

What is kept is counted twice, by what autograd holds and by what was allocated and not freed: the second count sees
tensors that a model hides from the first, and misses those that were there before, such as the images.
"""

import contextlib
import functools
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed_step import TrainingStep

DEEPEST = 4
"""How far into objects that a Function keeps on its ctx is looked for tensors."""

RESET_PEAK = "5"
"""Written to /proc/self/clear_refs, sets the peak of the resident memory back to what is resident now (proc(5))."""


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


def step_saved_bytes(step: TrainingStep) -> int:
    """What a training step keeps between forward and backward, its parameters and buffers left out."""
    return saved_bytes(step.loss, [*step.model.parameters(), *step.model.buffers()])


def held_bytes(forward: Callable[[], Tensor], device: str = "cpu") -> int:
    """Bytes that `forward` allocated on the device and that are in use when it has returned, whoever holds them."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        loss = forward()
        return torch.cuda.memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        loss = forward()  # noqa: F841  a name for it, so that its graph outlives the profile
    return sum(event.self_cpu_memory_usage for event in profile.events())


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


def peak_growth(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Bytes by which memory rises at most while `call` runs: resident memory on a CPU, torch's own on a GPU.

    On a CPU only a process of its own tells the truth, and one in which malloc gives freed memory back
    (`MALLOC_MMAP_THRESHOLD_`). None where the system keeps no such count.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        resident = _status("VmRSS")
        call()
        return _status("VmHWM") - resident
    except OSError:
        return None


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024
