"""Memory of a training step: the bytes that the forward keeps for the backward."""

from collections.abc import Callable

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that `forward` allocates and that are in use when it has returned the loss, whoever holds them.

    So tensors count too that a Function keeps past `save_for_backward`; what was there before, such as images and
    parameters, does not. Call `forward` once before: what it builds and keeps at its first call is no such memory.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        loss = forward()  # noqa: F841  a name for it, so that its graph outlives the profile
    return sum(event.self_cpu_memory_usage for event in profile.events())
