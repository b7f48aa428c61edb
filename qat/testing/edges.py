"""Checks at the edges: tensors without elements, NaN and infinities."""

import torch
from torch import Tensor

from qat.testing.comparison import index_of, number, require_close, uneven
from qat.testing.estimator import Estimator, Inputs
from qat.testing.report import GradcheckError, raising
from qat.testing.variants import without_elements


def check_empty(estimator: Estimator, inputs: Inputs) -> str:
    """Where x has no element, gradients have the shapes of their inputs, and those of parameters are zero."""
    usual = estimator.gradients(inputs)[1]
    empty = without_elements(estimator, inputs)
    words = f"x of shape {tuple(empty[0].shape)}: "
    with raising(words):
        _, gradients = estimator.gradients(empty)
    for slot, (gradient, tensor) in enumerate(zip(gradients, empty, strict=True)):
        if gradient is None:
            if usual[slot] is not None:
                raise GradcheckError(f"{words}slot {slot} gets no gradient, but it gets one otherwise")
            continue
        require_close(f"{words}gradient of slot {slot}", gradient, torch.zeros_like(tensor), 0, 0)
    return f"x of shape {tuple(empty[0].shape)}"


def check_nan_inf(estimator: Estimator, inputs: Inputs) -> str:
    """NaN stays NaN, infinities give no NaN, and neither changes other elements.

    If the function is not elementwise, NaN in x only has to give NaN somewhere. -inf is tried only if x has values
    below zero, which shows that they belong to its domain.
    """
    x = inputs[0]
    values = [float("nan"), float("inf"), *[-float("inf")] * bool((x < 0).any())]
    places = sorted({0, x.numel() // 2, x.numel() - 1})
    for place in places:
        index = index_of(place, x.shape)
        if not estimator.elementwise:
            y = estimator.output((_with(x, place, float("nan")), *inputs[1:]))
            if not y.isnan().any():
                raise GradcheckError(f"x = nan at {list(index)}: no element of the output is NaN")
            continue
        for value in values:
            _check_one(estimator, inputs, place, index, value)
    what = ", ".join(map(str, values)) if estimator.elementwise else "nan"
    return f"{what} at {len(places)} of {x.numel()} elements"


def _check_one(estimator: Estimator, inputs: Inputs, place: int, index: tuple[int, ...], value: float) -> None:
    x = inputs[0]
    words = f"x = {value} at {list(index)}: "
    y, gradients = estimator.gradients(inputs)
    with raising(words):
        got, disturbed = estimator.gradients((_with(x, place, value), *inputs[1:]), uneven(y))
    if got.shape != x.shape:
        raise GradcheckError(f"{words}the output of an elementwise function has shape {tuple(got.shape)}")
    own = got[index]
    if value != value and not own.isnan():
        raise GradcheckError(f"{words}the output there is {number(own)}, expected nan")
    if value == value and own.isnan():
        raise GradcheckError(f"{words}the output there is nan")
    estimator.require_close(f"{words}output", _with(got, place, 0), _with(y, place, 0), x)
    if gradients[0] is not None and disturbed[0] is not None:
        mine, theirs = _with(disturbed[0], place, 0), _with(gradients[0], place, 0)
        estimator.require_close(f"{words}gradient of slot 0", mine, theirs, x)


def _with(x: Tensor, place: int, value: float) -> Tensor:
    """x with another value at one place."""
    changed = x.detach().clone(memory_format=torch.contiguous_format)
    changed.view(-1)[place] = value
    return changed
