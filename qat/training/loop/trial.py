"""A step of training on trial, which changes nothing."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Step(NamedTuple):
    """The result of a trial step: the loss, the norm of all gradients, and the names of parameters that have one."""

    loss: float
    norm: float
    learning: frozenset[str]


def trial_step(
    model: nn.Module, forward: Callable[[Tensor], Any], loss_of: Callable[[Callable[[Tensor], Any]], Tensor]
) -> Step:
    """Run a forward and a backward of a model, through `forward`; neither it nor its gradients change."""
    named = dict(model.named_parameters())
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    gradients = [(each, each.grad) for each in named.values()]
    devices = {each.device.index or 0 for each in named.values() if each.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            for parameter in named.values():
                parameter.grad = None
            loss = loss_of(forward)
            loss.backward()  # type: ignore[no-untyped-call]
            found = {name: each.grad.detach() for name, each in named.items() if each.grad is not None}
            norm = math.hypot(*(float(torch.linalg.vector_norm(each.float())) for each in found.values()))
            return Step(float(loss.detach()), norm, frozenset(found))
        finally:
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            for parameter, gradient in gradients:
                parameter.grad = gradient
