"""The batches that `calibrate`, `verify_onnx` and `reestimate_batch_norm` read, and what is wrong with one."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat.expected import expect_model
from qat.torch_internals import pytree
from qat.tracing.inputs import as_arguments, call_model, model_device

Batch = Tensor | Sequence[Any] | Mapping[str, Any]
"""A tensor, a sequence of inputs and labels, or a mapping of keyword arguments."""

ONE_BATCH = "a batch must be a tensor, (inputs, labels), or a mapping of keyword arguments"


def as_batches(function: Callable[..., Any], model: Any, batches: Any) -> Iterable[Batch]:
    """The batches; a tensor, or a mapping of keyword arguments, is one batch.

    Args:
        function: the public function that reads them, for errors.
        model: what it was given as the model.
        batches: what it was given as the batches.

    Raises:
        TypeError: if the model is no module, or the batches cannot be iterated over.
        ValueError: if the model is on the meta device.

    >>> from qat import calibrate
    >>> len(list(as_batches(calibrate, nn.ReLU(), torch.zeros(8, 3)))), len(as_batches(calibrate, nn.ReLU(), [1, 2]))
    (1, 2)
    """
    check_model(function, model)
    if isinstance(batches, nn.Module) or not isinstance(batches, Iterable) or _is_array(batches):
        hint = "; torch.from_numpy makes it a tensor" if _is_array(batches) else ""
        raise TypeError(
            f"{function.__name__}: batches must be a loader, a list of batches or a tensor, got {_named(batches)}{hint}"
        )
    return [batches] if isinstance(batches, (Tensor, Mapping)) else batches


def check_model(function: Callable[..., Any], model: Any) -> None:
    """Check that the model which a public function was given is one, and can compute.

    Raises:
        TypeError: if it is no module.
        ValueError: if it is on the meta device.
    """
    expect_model(function, model)
    if model_device(model).type == "meta":
        raise ValueError(
            f"{function.__name__}: {type(model).__name__} is on the meta device and has no values; load the float"
            " model's weights before prepare"
        )


def inputs_and_labels(caller: str, batch: Batch) -> tuple[Any, Any]:
    """The inputs of a batch, and its labels; None if it has none.

    torchvision's loaders of detection data, `collate_fn=lambda batch: tuple(zip(*batch))`, give a tuple of images and
    one of targets. These images are one argument, a list.

    Raises:
        TypeError: for anything else than a `Batch`.

    >>> inputs_and_labels("f", ({"x": 1}, "labels")), inputs_and_labels("f", {"x": 1})
    (({'x': 1}, 'labels'), ({'x': 1}, None))
    >>> inputs_and_labels("f", (("image", "image"), ({"boxes": 1}, {"boxes": 2})))[0]
    ['image', 'image']
    """
    if isinstance(batch, (Tensor, Mapping)):
        return batch, None
    if not isinstance(batch, Sequence) or isinstance(batch, str) or not batch:
        hint = "; torch.from_numpy makes it a tensor" if _is_array(batch) else ""
        raise TypeError(f"{caller}: {ONE_BATCH}, got {_named(batch)}{hint}")
    inputs, labels = batch[0], batch[1] if len(batch) > 1 else None
    return (list(inputs) if _is_detection(inputs, labels) else inputs), labels


def answer(caller: str, model: nn.Module, inputs: Any) -> Any:
    """The model's output for the inputs of a batch, moved to its device.

    Raises:
        ValueError: if the model does not run with them, and it is known why; other errors are the model's own.
    """
    try:
        return call_model(model, inputs)
    except Exception as error:  # of the user's own code
        reason = _reason(model, inputs, error)
        if reason is None:
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{caller}: {type(model).__name__} does not run with a batch: {reason} ({first})") from error


def _is_detection(inputs: Any, labels: Any) -> bool:
    """Whether these are tuples of images and of their targets: a mapping each, or COCO's list of mappings."""
    several = isinstance(inputs, tuple) and isinstance(labels, (tuple, list)) and len(inputs) == len(labels) > 0
    return several and all(isinstance(target, (Mapping, list)) for target in labels)


def _reason(model: nn.Module, inputs: Any, error: Exception) -> str | None:
    """Why a model does not run with the inputs, and what to give it instead; None if that is not known."""
    leaves = pytree.tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    signature = inspect.signature(model.forward)
    forward = f"forward({', '.join(signature.parameters)})"
    if any(map(_is_array, leaves)):
        return "it holds a numpy array; torch.from_numpy makes it a tensor"
    if isinstance(inputs, Mapping) and not _fits(signature, inputs):
        key = next(iter(inputs), "image")
        return (
            f"the keys of a mapping are arguments of {forward}, and it has"
            f" {', '.join(map(repr, inputs))}; give the inputs alone:"
            f" batch[{key!r}], or (batch[{key!r}] for batch in loader)"
        )
    if isinstance(inputs, tuple):
        return (
            f"its first item is a tuple of {len(inputs)}, which are the arguments of {forward}; where they"
            " are one argument, a list of images, give ([*images], targets)"
        )
    if isinstance(inputs, list) and tensors:
        return (
            f"its inputs are a list of {len(inputs)}, one argument of {forward}; where that is one tensor, stack them"
        )
    if tensors and isinstance(error, (TypeError, RuntimeError)) and not any(map(torch.is_floating_point, tensors)):
        x = tensors[0]
        hint = (
            "scale images to floating point as in training, such as images.float() / 255"
            if x.dtype == torch.uint8
            else "a batch is (inputs, labels), in this order"
        )
        return f"its inputs are {x.dtype} of shape {tuple(x.shape)}; {hint}"
    return None


def _fits(signature: inspect.Signature, inputs: Any) -> bool:
    args, kwargs = as_arguments(inputs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_array(value: Any) -> bool:
    """Whether a value is numpy's; numpy is not imported for it."""
    return type(value).__module__ == "numpy"


def _named(value: Any) -> str:
    """What an error calls a wrong value: what is short as it is, all else by its type."""
    shown = isinstance(value, (int, float, str, type(None))) or (isinstance(value, (tuple, list)) and not value)
    return repr(value) if shown else type(value).__name__
