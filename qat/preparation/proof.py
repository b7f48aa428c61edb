"""`self_check`: compares the training step on codes with the plain step, for every traced part of a model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from qat.evaluating import evaluating
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.verdict import Verdict


def self_check(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Verdict]:
    """Compare a fused training step of every traced part with the plain step; only what agrees trains on codes.

    `calibrate` does this, and so does the first training step after a change. A model that is loaded from a checkpoint
    and compiled at once needs this call: compiled code cannot check itself, and trains the plain graph until then.

    Args:
        model: a calibrated model from `prepare`; it is left as it was.
        args, kwargs: arguments of its forward; a slice of the batch is used.

    Returns:
        The verdict for each part, by its name ("" for the whole model). Parts to which no kernel applies are missing.

    >>> import qat
    >>> x = torch.randn(4, 3, 8, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), example_inputs=x)
    >>> qat.calibrate(model, [x])
    >>> sorted(qat.self_check(model, x)) in ([""], [])
    True
    """
    with evaluating(model), torch.no_grad(), first_calls(model) as calls:
        model(*args, **kwargs)
    return prove(model, calls)


@contextmanager
def first_calls(model: nn.Module) -> Iterator[dict[PreparedGraph, Any]]:
    """A context that records the arguments of the first call of every traced part."""
    calls: dict[PreparedGraph, Any] = {}

    def note(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(called, (args, kwargs))

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, PreparedGraph):
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield calls


def prove(model: nn.Module, calls: dict[PreparedGraph, Any]) -> dict[str, Verdict]:
    """`self_check` of the parts with the arguments that `first_calls` recorded."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PreparedGraph) and module in calls:
            args, kwargs = calls[module]
            verdict = module._prove(*args, **kwargs)
            if verdict is not None:
                found[name] = verdict
    return found
