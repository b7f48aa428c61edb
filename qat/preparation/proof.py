"""Checks of a calibrated model: of training on codes, and of a user's twins."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qat.contexts import evaluating, first_calls
from qat.inputs import Arguments, copied, expect_model
from qat.layers import QuantLayer
from qat.preparation.prepared_graph import PreparedGraph

MOST_APART = 0.02
"""Share by which a twin may evaluate otherwise than it trains, for rounding."""


def self_check(model: nn.Module, *args: object, **kwargs: object) -> dict[str, Any]:
    """Compare a fused training step of every traced part with the plain step.

    Only what agrees trains on codes. `calibrate` does this, and so does the first training step after a change. A model
    that is loaded from a checkpoint and compiled at once needs this call: compiled code cannot check itself, and trains
    the plain graph until then.

    The other arguments are those of the model's forward; a slice of the batch is used, and the model is left as it was.
    It returns a `qat.codes.verdict.Verdict` for each part, by its name ("" for the whole model), without parts to which
    no kernel applies.

    >>> import qat
    >>> x = torch.randn(4, 3, 8, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), example_inputs=x)
    >>> qat.calibrate(model, [x])
    >>> sorted(qat.self_check(model, x)) in ([""], [])
    True
    """
    expect_model(self_check, model)
    with evaluating(model), torch.no_grad(), first_calls(traced_parts(model).values()) as calls:
        model(*copied(args), **copied(kwargs))
    return check_parts(model, calls)


def traced_parts(model: nn.Module) -> dict[str, PreparedGraph]:
    """Return the parts of a prepared model that are graphs, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PreparedGraph)}


def check_parts(model: nn.Module, calls: Mapping[Any, Any]) -> dict[str, Any]:
    """Run `self_check` of the parts with the arguments that `first_calls` recorded."""
    found = {}
    for name, part in traced_parts(model).items():
        engine = part._fused_engine() if part in calls else None
        verdict = None if engine is None else engine._check_before_training(*calls[engine])
        if verdict is not None:
            found[name] = verdict
    return found


def check_own_twins(model: nn.Module, calls: dict[PreparedGraph, Arguments]) -> None:
    """Compare both ways for every layer of a user's class, on the parts' first calls."""
    theirs = ("qat.", "torch.")  # FSDP2 gives a layer that it shards a class of torch's
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLayer)]
    own = {name: layer for name, layer in layers if not type(layer).__module__.startswith(theirs)}
    with evaluating(model), torch.no_grad(), ExitStack() as hooks:
        for name, layer in own.items():
            hooks.enter_context(layer.register_forward_hook(partial(_compare, name), with_kwargs=True))
        for graph, (args, kwargs) in calls.items() if own else ():
            graph(*args, **kwargs)


def _compare(name: str, layer: QuantLayer, args: tuple[Any, ...], kwargs: dict[str, Any], evaluated: object) -> None:
    if not isinstance(evaluated, Tensor) or not evaluated.numel():
        return
    layer.training = True  # of the layer alone: its quantizers stay in evaluation
    try:
        trained = layer.forward(*args, **kwargs)
    finally:
        layer.training = False
    largest, off = float(trained.abs().max()), float((trained - evaluated).abs().max())
    if off > MOST_APART * largest:
        raise ValueError(
            f"calibrate: {name} ({type(layer).__name__}) answers up to {largest:.3g} in training, and evaluation on"
            f" integers is {off:.3g} away from that: its operate must be linear and add the bias last and unscaled, see"
            " qat.layers.register_twin"
        )
