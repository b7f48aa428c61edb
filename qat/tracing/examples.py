"""Example inputs: by the names that forward has for them, and calling a model with them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat.torch_internals import pytree
from qat.tracing.nodes import model_device

Examples = dict[str, Any]


def bind_inputs(model: nn.Module, example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> Examples:
    """Example inputs by argument name of forward, on the model's device.

    Raises:
        ValueError: if forward does not take them.
    """
    device = model_device(model)
    moved = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, example_inputs)
    try:
        if isinstance(moved, Mapping):
            return bind_arguments(model, (), dict(moved))
        return bind_arguments(model, moved if isinstance(moved, tuple) else (moved,), {})
    except TypeError as error:
        raise ValueError(f"prepare: example_inputs do not fit {type(model).__name__}.forward: {error}") from error


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Examples:
    """Arguments by the names that forward has for them.

    Raises:
        TypeError: if forward does not take them, or takes any number of them (*args).
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    for parameter in bound.signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name in bound.arguments:
            raise TypeError(f"its arguments have no names, only *{parameter.name}")
    return dict(bound.arguments)


def call_with(model: nn.Module, examples: Examples) -> Any:
    """The model's answer to copies of the example inputs, by position as far as that goes: hooks look there."""
    given = copied(examples)
    args: list[Any] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.name not in given:
            break
        args.append(given.pop(parameter.name))
    return model(*args, **given)


def copied(values: Any) -> Any:
    """The same values with copies of the tensors, since a model may write into its inputs."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, values)
