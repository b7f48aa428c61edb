"""Inputs of a model, batches of a loader, and sentences for those that do not fit."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat.text import check_types, first_line
from qat.torch_internals import pytree

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]  # a tensor, a tuple of arguments, or keyword arguments
Batch = Tensor | Sequence[Any] | Mapping[str, Any]  # a tensor, inputs and labels, or keyword arguments
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
Examples = dict[str, Any]  # example inputs by the names of forward's arguments


def as_arguments(inputs: object) -> Arguments:
    """Return the arguments of a call with these inputs.

    >>> as_arguments({"x": 1}), as_arguments((1, 2)), as_arguments([1, 2])
    (((), {'x': 1}), ((1, 2), {}), (([1, 2],), {}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def moved_to(device: torch.device, values: object) -> Any:
    """Return the values with their tensors on a device, in lists and mappings too."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, values)


def copied(values: object) -> Any:
    """Return the same values with copies of the tensors: a model may write into them."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)


def call_model(model: nn.Module, inputs: object) -> Any:
    """Return the model's output for these inputs, moved to its device."""
    args, kwargs = as_arguments(moved_to(model_device(model), inputs))
    return model(*args, **kwargs)


def call_with(model: nn.Module, examples: Examples) -> Any:
    """Return the model's output for copies of the example inputs."""
    return call_given(model, copied(examples))


def call_given(model: nn.Module, examples: Examples) -> Any:
    """Return the model's output for arguments by name."""
    # By position where possible, since hooks look there.
    given, args = dict(examples), list[Any]()
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.name not in given:
            break  # after a gap, names are needed
        one = given.pop(parameter.name)
        args += one if parameter.kind is parameter.VAR_POSITIONAL else [one]
    return model(*args, **given)


def bind_inputs(caller: str, model: nn.Module, example_inputs: Inputs) -> Examples:
    """Return example inputs by argument name; ValueError if forward takes others."""
    try:
        return bind_arguments(model, *as_arguments(moved_to(model_device(model), example_inputs)))
    except (TypeError, NotImplementedError) as error:  # the latter for inputs on the meta device
        raise ValueError(f"{caller}: example_inputs do not fit {type(model).__name__}.forward: {error}") from error


def bind_arguments(model: nn.Module, args: tuple[object, ...], kwargs: Examples) -> Examples:
    """Return arguments by name; TypeError if forward does not take them."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    found = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name, {})
    return found


def as_batches(function: Callable[..., object], model: nn.Module, batches: Iterable[Batch]) -> Iterable[Batch]:
    """Return the batches of a public function; a tensor or a mapping is one batch.

    >>> from qat import calibrate
    >>> len(list(as_batches(calibrate, nn.ReLU(), torch.zeros(8, 3)))), len(as_batches(calibrate, nn.ReLU(), [1, 2]))
    (1, 2)
    """
    check_model(function, model)
    if isinstance(batches, nn.Module) or not isinstance(batches, Iterable) or _is_array(batches):
        raise TypeError(
            f"{function.__name__}: batches must be a loader, a list of batches or a tensor, got {described(batches)}"
        )
    return [batches] if isinstance(batches, (Tensor, Mapping)) else batches


def expect_model(function: Any, model: object, given: Mapping[str, object] | None = None) -> None:
    """Raise a TypeError if `model` is no model; `check_types` for others `given`."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{function.__name__}: model must be a torch.nn.Module, got {kind}")
    if given is not None:
        check_types(function.__init__ if isinstance(function, type) else function, given)  # type: ignore[misc]


def check_model(function: Callable[..., object], model: nn.Module) -> None:
    """Refuse what is no model, and a model on the meta device, which cannot compute."""
    expect_model(function, model)
    if model_device(model).type == "meta":
        raise ValueError(
            f"{function.__name__}: {type(model).__name__} is on the meta device and has no values; load the float"
            " model's weights before prepare"
        )


def inputs_and_labels(caller: str, batch: Batch) -> tuple[Any, Any]:
    """Return the inputs of a batch, and its labels or None.

    torchvision's loaders of detection data, `collate_fn=lambda batch: tuple(zip(*batch))`, give a tuple of images and
    one of targets. These images are one argument, a list.
    """
    if isinstance(batch, (Tensor, Mapping)):
        return batch, None
    if not isinstance(batch, Sequence) or isinstance(batch, str) or not batch:
        raise TypeError(
            f"{caller}: a batch must be a tensor, (inputs, labels), or a mapping of keyword arguments, got"
            f" {described(batch)}"
        )
    inputs, labels = batch[0], batch[1] if len(batch) > 1 else None  # further items are ignored
    return (list(inputs) if _is_detection(inputs, labels) else inputs), labels


def run_batch(caller: str, model: nn.Module, inputs: object) -> Any:
    """Return the model's output for copies of a batch's inputs, on its device."""
    try:
        return call_model(model, copied(inputs))
    except Exception as error:  # from the user's own code
        told = isinstance(error, RuntimeError) or str(error).startswith(caller)
        if told and isinstance(inputs, Tensor) and inputs.is_floating_point():
            raise  # it says enough of a tensor of floats
        alone = isinstance(inputs, Tensor)
        form = "((x, y), labels) is a batch of two inputs, ([x, y], labels) of one that is a list" * alone
        raise does_not_run(caller, model, f"a batch of {described(inputs)}", error, form) from error


def does_not_run(caller: str, model: nn.Module, given: str, error: Exception, cure: str = "") -> ValueError:
    """Return the error of a model that does not run with what it was given."""
    arguments = ", ".join(inspect.signature(model.forward).parameters)
    return ValueError(
        f"{caller}: {type(model).__name__}.forward({arguments}) does not run with {given}: {first_line(error)}"
        f"{cure and f'; {cure}'}"
    )


def described(values: Any) -> str:
    """Describe inputs in a line: types, dtypes and shapes.

    >>> described({"x": (torch.zeros(2, 3), [1.5])})
    '{x: (float32 (2, 3), [float])}'
    >>> import numpy as np
    >>> described(np.zeros(2))
    'ndarray (torch.from_numpy makes it a tensor)'
    """
    if isinstance(values, Tensor):
        return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"
    if isinstance(values, Mapping):
        return f"{{{', '.join(f'{key}: {described(value)}' for key, value in values.items())}}}"
    if type(values) in (tuple, list):
        some = [*map(described, values[:3]), *["..."] * (len(values) > 3)]
        return f"({', '.join(some)})" if isinstance(values, tuple) else f"[{', '.join(some)}]"
    return type(values).__name__ + " (torch.from_numpy makes it a tensor)" * _is_array(values)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer; the CPU if there is none."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _is_detection(inputs: object, labels: object) -> bool:
    # Tuples of images and of their targets: a mapping each, or COCO's list of mappings.
    if not (isinstance(inputs, tuple) and isinstance(labels, (tuple, list)) and len(inputs) == len(labels) > 0):
        return False
    return all(isinstance(target, (Mapping, list)) for target in labels)


def _is_array(value: object) -> bool:
    return type(value).__module__ == "numpy"  # without importing NumPy
