"""Caches by size: what a model kept for the inputs that it saw last would fix their sizes in an export."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qat.graph.side_effects import restoring_state, state_of


def empty_caches(model: nn.Module, run: Callable[[int], Any]) -> None:
    """Let attributes in which forward keeps sizes of its inputs hold what no size equals.

    Args:
        model: a copy that is thrown away.
        run: calls it with so many samples.
    """
    with restoring_state(model), torch.no_grad():
        run(2)
        before = _sizes(model)
        run(3)
        after = _sizes(model)
    for name in [name for name, value in before.items() if after.get(name) != value]:
        owner, _, key = name.rpartition(".")
        held = vars(model.get_submodule(owner))
        held[key] = {set: {}, int: -1}.get(type(before[name]), ())


def _sizes(model: nn.Module) -> dict[str, Any]:
    """The attributes that can hold sizes: integers, tuples of integers, and dictionaries by their keys."""
    return {
        name: set(value) if type(value) is dict else value
        for name, value in state_of(model).items()
        if type(value) in (int, dict) or (type(value) in (tuple, torch.Size) and all(type(x) is int for x in value))
    }
