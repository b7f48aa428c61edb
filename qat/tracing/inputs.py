"""The inputs of a model: a tensor, a tuple of arguments, or a mapping of keyword arguments."""

import inspect
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qat.text import first_line
from qat.torch_internals import pytree

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

Examples = dict[str, Any]
"""Example inputs by the names of forward's arguments."""


def as_arguments(inputs: Any) -> Arguments:
    """The arguments of a call with these inputs.

    >>> as_arguments({"x": 1}), as_arguments((1, 2)), as_arguments([1, 2])
    (((), {'x': 1}), ((1, 2), {}), (([1, 2],), {}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def moved_to(device: torch.device, values: Any) -> Any:
    """The same values with their tensors on a device, in lists and mappings too."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, values)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's output for these inputs, moved to its device."""
    args, kwargs = as_arguments(moved_to(model_device(model), inputs))
    return model(*args, **kwargs)


def copied(values: Any) -> Any:
    """The same values with copies of the tensors, since a model may write into its inputs."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)


def bind_inputs(caller: str, model: nn.Module, example_inputs: Inputs) -> Examples:
    """Example inputs by argument name of forward, on the model's device.

    Raises:
        ValueError: if forward does not take them.
    """
    try:
        return bind_arguments(model, *as_arguments(moved_to(model_device(model), example_inputs)))
    except (TypeError, NotImplementedError) as error:  # the latter for inputs on the meta device
        raise ValueError(f"{caller}: example_inputs do not fit {type(model).__name__}.forward: {error}") from error


def why_it_does_not_run(examples: Examples, error: Exception) -> str:
    """What is wrong with example inputs with which a model fails: what they are, and the way out or the error itself.

    >>> why_it_does_not_run({"x": [1.0]}, TypeError("conv2d() got a list"))
    'x is list; a list is one argument: give the tensor itself, or a tuple of arguments'
    >>> why_it_does_not_run({"x": torch.zeros(2, dtype=torch.uint8)}, RuntimeError("expected Float"))
    'x is torch.uint8 of shape (2,): expected Float'
    """
    shown, ways = [], []
    for name, value in examples.items():
        of_tensor = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        shown.append(f"{name} is {of_tensor or type(value).__name__}")
        ways.append(_way_out(value))
    wrong_type = isinstance(error, (TypeError, AttributeError))
    if wrong_type and any(ways):
        return "; ".join(f"{what}; {way}" for what, way in zip(shown, ways, strict=True) if way)
    return f"{', '.join(shown)}: {first_line(error)}"


def _way_out(value: Any) -> str:
    """What to give instead of an argument that no layer takes; "" for a tensor, and for what forward may want."""
    match value:
        case np.ndarray():
            return "torch.from_numpy makes it a tensor"
        case list():
            return "a list is one argument: give the tensor itself, or a tuple of arguments"
        case str() | int() | float() | torch.Size() | torch.device():
            return "give a tensor as forward gets it"
        case Tensor() | tuple() | Mapping():
            return ""
        case Iterable():
            return "take the inputs of one of its batches"
    return ""


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Examples:
    """Arguments by the names that forward gives them.

    Raises:
        TypeError: if forward does not take them, or takes any number of them (*args).
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    for parameter in bound.signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name in bound.arguments:
            raise TypeError(f"its arguments have no names, only *{parameter.name}")
    return dict(bound.arguments)


def call_with(model: nn.Module, examples: Examples) -> Any:
    """The model's answer to copies of the example inputs, passed by position where possible, since hooks look there."""
    given = copied(examples)
    args: list[Any] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.name not in given:
            break
        args.append(given.pop(parameter.name))
    return model(*args, **given)


def model_device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU if it has none."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device
