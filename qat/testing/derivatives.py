"""Checks of the gradient: against the declared one, for every subset of slots, every shape, and in second order."""

import itertools
from typing import Any

import torch
from torch import Tensor

from qat.testing.comparison import index_of, largest, number, require_close, uneven
from qat.testing.estimator import Estimator, Gradients, Inputs, as_leaves, filled, pull_back
from qat.testing.report import GradcheckError, Skipped, plural, raising
from qat.testing.variants import parameter_shapes, per_channel, with_axes
from qat.torch_internals import applied_function

MOST_BLAMED = 2000


def check_gradient(estimator: Estimator, inputs: Inputs) -> str:
    """Every slot's gradient equals the declared one, and is None exactly where that is None."""
    before = [tensor.clone() for tensor in inputs]
    y, got = estimator.gradients(inputs)
    for slot, (old, new) in enumerate(zip(before, inputs, strict=True)):
        require_close(f"slot {slot} is changed in place: its value", new, old, 0, 0)
    expected = estimator.declared_gradients(inputs, uneven(y))
    for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if mine is None and theirs is not None:
            raise GradcheckError(f"slot {slot} gets no gradient, but its declared gradient is not None")
        if mine is not None and theirs is None:
            raise GradcheckError(f"slot {slot} gets a gradient, but its declared gradient is None")
    _require_declared(estimator, "", inputs, got, expected)
    return f"{plural(len(inputs), 'slot')} at {plural(inputs[0].numel(), 'value')} of x"


def check_slots(estimator: Estimator, inputs: Inputs) -> str:
    """Each subset of slots gets the same gradients; none is computed for the others (`ctx.needs_input_grad`)."""
    y, full = estimator.gradients(inputs)
    subsets = list(itertools.product((False, True), repeat=len(inputs)))
    for wanted in subsets:
        asking = [slot for slot, asks in enumerate(wanted) if asks]
        words = f"with gradients for {'slots' if len(asking) > 1 else 'slot'} {', '.join(map(str, asking))}"
        words = f"{words} only: " if asking else "with gradients for no slot: "
        leaves = as_leaves(inputs, wanted)
        own = estimator.function(*leaves)
        if own.requires_grad and not asking:
            raise GradcheckError(f"{words}the output requires a gradient")
        estimator.require_close(f"{words}output", own, y, inputs[0])
        unasked = _watch(own)
        got = pull_back(own, leaves, uneven(own))
        expected = tuple(gradient if asks else None for gradient, asks in zip(full, wanted, strict=True))
        estimator.require_same_gradients(words, got, expected, inputs)
        if unasked:
            raise GradcheckError(f"{words}{unasked[0]} (see ctx.needs_input_grad)")
    return plural(len(subsets), "subset") + " of slots"


def check_broadcast(estimator: Estimator, inputs: Inputs) -> str:
    """The slots in `broadcast` work per tensor and per channel, all together and one at a time."""
    if not estimator.broadcast:
        raise Skipped("no slot is named in broadcast")
    x = with_axes(estimator, inputs[0], 3)
    together = [estimator.broadcast]
    if len(estimator.broadcast) > 1:
        together += [(slot,) for slot in estimator.broadcast]
    tried = 0
    for slots, (words, shape) in itertools.product(together, list(parameter_shapes(x))):
        shaped = [x, *inputs[1:]]
        for slot in estimator.broadcast:
            shaped[slot] = per_channel(inputs[slot], shape if slot in slots else ())
        named = f"{'slots' if len(slots) > 1 else 'slot'} {', '.join(map(str, slots))} of shape {words}: "
        with raising(named):
            y, got = estimator.gradients(tuple(shaped))
        expected = estimator.declared_gradients(tuple(shaped), uneven(y))
        _require_declared(estimator, named, tuple(shaped), got, expected)
        if estimator.elementwise and torch.Size(shape).numel() > 1:
            _require_each_channel(estimator, named, tuple(shaped), y, shape)
        tried += 1
    return f"{plural(tried, 'shape')} against x of shape {tuple(x.shape)}"


def check_second_order(estimator: Estimator, inputs: Inputs) -> str:
    """The gradients, differentiated again by every slot and by the cotangent, equal the declared ones.

    Terms as large as the gradients cancel here, so `atol` is relative to the largest gradient.
    """
    cotangent = uneven(estimator.output(inputs))
    got, expected = estimator.second_order(inputs, cotangent), estimator.declared_second_order(inputs, cotangent)
    size = max(largest(gradient) for gradient in filled(estimator.declared_gradients(inputs, cotangent), inputs))
    atol = estimator.atol * max(1.0, size)
    for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for by, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            name = f"slot {by}" if by < len(inputs) else "the incoming gradient"
            words = f"gradient of slot {slot} differentiated by {name}"
            require_close(words, one, other, estimator.rtol, atol, inputs[0])
    return f"{plural(len(inputs), 'gradient')} differentiated by {plural(len(inputs) + 1, 'tensor')}"


def _require_declared(estimator: Estimator, words: str, inputs: Inputs, got: Gradients, expected: Gradients) -> None:
    """Compare gradients; if a parameter's is wrong, name the element of the output that causes it."""
    try:
        estimator.require_same_gradients(words, got, expected, inputs)
    except GradcheckError:
        _blame(estimator, words, inputs)
        raise


def _blame(estimator: Estimator, words: str, inputs: Inputs) -> None:
    """Raise for the first element of the output whose own gradient is wrong, if there is one."""
    x, whole = inputs[0], uneven(estimator.output(inputs))
    for position in range(min(whole.numel(), MOST_BLAMED)):
        one = torch.zeros_like(whole)
        one.view(-1)[position] = 1.0
        got = filled(estimator.gradients(inputs, one)[1], inputs)
        expected = filled(estimator.declared_gradients(inputs, one), inputs)
        index = index_of(position, whole.shape)
        there = f", where x = {number(x[index])}" if x.shape == whole.shape else ""
        for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            wrong = ~torch.isclose(mine, theirs, rtol=estimator.rtol, atol=estimator.atol, equal_nan=True)
            if mine.shape == theirs.shape and wrong.any():
                at = tuple(wrong.nonzero()[0].tolist())
                of = f"slot {slot} at {list(at)}" if at else f"slot {slot}"
                place = f"{words}d y{list(index)} / d {of}{there}"
                raise GradcheckError(f"{place}: got {number(mine[at])}, expected {number(theirs[at])}")


def _require_each_channel(estimator: Estimator, words: str, inputs: Inputs, y: Tensor, shape: tuple[int, ...]) -> None:
    """The output equals that of each channel alone with its own parameters."""
    x = inputs[0]
    along = shape.index(max(shape)) - len(shape)
    for channel in range(x.shape[along]):
        alone = [x.narrow(along, channel, 1)]
        for slot, parameter in enumerate(inputs[1:], start=1):
            own = slot in estimator.broadcast and parameter.shape == shape
            alone.append(parameter.flatten()[channel] if own else parameter)
        expected, part = estimator.output(tuple(alone)), y.narrow(along, channel, 1)
        if expected.shape == part.shape:  # otherwise another parameter still has all channels
            estimator.require_close(f"{words}output of channel {channel}", part, expected, alone[0])


def _watch(y: Tensor) -> list[str]:
    """A list that backward fills with the gradients that a Function computes although no one needs them."""
    unasked: list[str] = []
    seen, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            asks = [following is not None for following, _ in node.next_functions]
            node.register_hook(_note(applied_function(node).__name__, asks, unasked))
    return unasked


def _note(name: str, asks: list[bool], unasked: list[str]) -> Any:
    def hook(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        for position, (gradient, wanted) in enumerate(zip(gradients, asks, strict=False)):
            if gradient is not None and not wanted:
                unasked.append(f"{name} computes a gradient for its input {position}, which asks for none")

    return hook
