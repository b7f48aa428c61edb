"""`self_check`: every traced part of a model shows that it trains on codes as it does operation by operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qat.evaluating import evaluating
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.verdict import Verdict


def self_check(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Verdict]:
    """Hold a fused training step of every traced part to the plain one, and let it train as that allows.

    `calibrate` does this, and so does the first training step where something changed. A model that is loaded from a
    checkpoint and compiled at once needs it: compiled code cannot check itself, and trains the prepared graph until
    then.

    Args:
        model: from `prepare`, calibrated; it is left as it was.
        args, kwargs: of its forward; a slice of the batch is looked at.

    Returns:
        What was found, by the name of the part ("" for the whole model); parts are missing where no kernels apply.

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
    """A context that notes what the traced parts of a model are called with first."""
    calls: dict[PreparedGraph, Any] = {}

    def note(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(called, (args, kwargs))

    graphs = [module for module in model.modules() if isinstance(module, PreparedGraph)]
    hooks = [graph.register_forward_pre_hook(note, with_kwargs=True) for graph in graphs]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def prove(model: nn.Module, calls: dict[PreparedGraph, Any]) -> dict[str, Verdict]:
    """`self_check` of parts, with what they were called with."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PreparedGraph) and module in calls:
            args, kwargs = calls[module]
            verdict = module._prove(*args, **kwargs)
            if verdict is not None:
                found[name] = verdict
    return found
