"""Checks of gradients: declared ones, second order, `torch.func`, forward mode."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qat.contexts import warnings_ignored
from qat.testing.estimator import (
    COPIES,
    Estimator,
    Gradients,
    Inputs,
    as_leaves,
    batches,
    filled,
    parameter_shapes,
    per_channel,
    pull_back,
    with_axes,
)
from qat.testing.report import (
    GradcheckError,
    Skipped,
    index_of,
    largest,
    number,
    raising,
    require_close,
    slots_in_words,
    uneven,
)
from qat.text import plural
from qat.torch_internals import applied_function

MOST_BLAMED = 2000  # elements that are tried alone to find the wrong one
LARGEST_JACOBIAN = 64  # elements of an input or output
SMALL = 8  # values of x that Jacobians are taken at


def check_gradient(estimator: Estimator, inputs: Inputs) -> str:
    """Check that every slot's gradient equals the declared one, None included."""
    y, got = estimator.gradients(inputs)
    expected = estimator.declared_gradients(inputs, uneven(y))
    for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if mine is None and theirs is not None:
            raise GradcheckError(f"slot {slot} gets no gradient, but its declared gradient is not None")
        if mine is not None and theirs is None:
            raise GradcheckError(f"slot {slot} gets a gradient, but its declared gradient is None")
    _require_declared(estimator, "", inputs, got, expected)
    return f"{plural(len(inputs), 'slot')} at {plural(inputs[0].numel(), 'value')} of x"


def check_slots(estimator: Estimator, inputs: Inputs) -> str:
    """Check that each subset of slots gets the same gradients, and no others."""
    y, full = estimator.gradients(inputs)
    subsets = list(itertools.product((False, True), repeat=len(inputs)))
    for wanted in subsets:
        asking = [slot for slot, asks in enumerate(wanted) if asks]
        words = f"with gradients for {slots_in_words(asking)} only: " if asking else "with gradients for no slot: "
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
    """Check the slots in `broadcast` per tensor and per channel, together and alone."""
    if not estimator.broadcast:
        raise Skipped("no slot is named in broadcast")
    x = with_axes(estimator, inputs[0], 3)
    groups = [estimator.broadcast]
    if len(estimator.broadcast) > 1:
        groups += [(slot,) for slot in estimator.broadcast]
    tried = list(itertools.product(groups, parameter_shapes(x)))
    for slots, (words, shape) in tried:
        shaped = [x, *inputs[1:]]
        for slot in estimator.broadcast:
            shaped[slot] = per_channel(inputs[slot], shape if slot in slots else ())
        named = f"{slots_in_words(slots)} of shape {words}: "
        with raising(named):
            y, got = estimator.gradients(tuple(shaped))
        expected = estimator.declared_gradients(tuple(shaped), uneven(y))
        _require_declared(estimator, named, tuple(shaped), got, expected)
        if estimator.elementwise and torch.Size(shape).numel() > 1:
            _require_each_channel(estimator, named, tuple(shaped), y, shape)
    return f"{plural(len(tried), 'shape')} against x of shape {tuple(x.shape)}"


def check_second_order(estimator: Estimator, inputs: Inputs) -> str:
    """Check the gradients, differentiated again by every slot and by the cotangent."""
    cotangent = uneven(estimator.output(inputs))
    got, expected = estimator.second_order(inputs, cotangent), estimator.declared_second_order(inputs, cotangent)
    size = max(largest(gradient) for gradient in filled(estimator.declared_gradients(inputs, cotangent), inputs))
    atol = estimator.atol * max(1.0, size)  # terms as large as the gradients cancel here
    for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for by, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            name = f"slot {by}" if by < len(inputs) else "the incoming gradient"
            words = f"gradient of slot {slot} differentiated by {name}"
            require_close(words, one, other, estimator.rtol, atol, inputs[0])
    return f"{plural(len(inputs), 'gradient')} differentiated by {plural(len(inputs) + 1, 'tensor')}"


def _require_declared(estimator: Estimator, words: str, inputs: Inputs, got: Gradients, expected: Gradients) -> None:
    try:
        estimator.require_same_gradients(words, got, expected, inputs)
    except GradcheckError:
        _blame_element(estimator, words, inputs)
        raise  # no single element is to blame


def _blame_element(estimator: Estimator, words: str, inputs: Inputs) -> None:
    # Raises for the first element of the output whose own gradient is wrong: it says more than a parameter's sum.
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
    # A list that backward fills with the gradients that a Function computes although no one needs them
    unasked: list[str] = []
    seen, ahead = set(), [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:  # None: an input that asks for no gradient
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            asks = [following is not None for following, _ in node.next_functions]
            node.register_hook(_note(applied_function(node).__name__, asks, unasked))
    return unasked


def _note(name: str, asks: list[bool], unasked: list[str]) -> Callable[..., None]:
    def hook(gradients: tuple[Tensor | None, ...], _: object) -> None:
        for position, (gradient, wanted) in enumerate(zip(gradients, asks, strict=False)):
            if gradient is not None and not wanted:
                unasked.append(f"{name} computes a gradient for its input {position}, which asks for none")

    return hook


def check_func_grad(estimator: Estimator, inputs: Inputs) -> str:
    """Check that `torch.func.grad` and `torch.func.vjp` equal autograd."""
    y, found = estimator.gradients(inputs)
    expected = filled(found, inputs)

    def loss(*tensors: Tensor) -> Tensor:
        return torch.sum(estimator.function(*tensors) * uneven(y))

    slots = tuple(range(len(inputs)))
    with raising("torch.func.grad "):
        got = torch.func.grad(loss, argnums=slots)(*inputs)
    estimator.require_same_gradients("torch.func.grad: ", got, expected, inputs)
    for slot in slots:
        words = f"torch.func.grad for slot {slot} only"
        with raising(f"{words} "):
            alone = torch.func.grad(loss, argnums=slot)(*inputs)
        estimator.require_close(words, alone, expected[slot], inputs[0])
    with raising("torch.func.vjp "):
        value, pull = torch.func.vjp(estimator.function, *inputs)[:2]
        pulled = pull(uneven(y))
    estimator.require_close("torch.func.vjp: output", value, y, inputs[0])
    estimator.require_same_gradients("torch.func.vjp: ", pulled, expected, inputs)
    return f"grad and vjp for {plural(len(inputs), 'slot')}"


def check_vmap(estimator: Estimator, inputs: Inputs) -> str:
    """Check that `torch.func.vmap` of function and gradient equals a loop.

    x, parameters or both are batched. Noise is drawn once for the whole batch, so that a function that seeds each call
    equals the loop too.
    """
    many, rest = batches(inputs), len(inputs) - 1
    in_dims: dict[str, tuple[int | None, ...]] = {
        "x": (0, *[None] * rest),
        "x along its last axis": (-1, *[None] * rest),
    }
    if rest:
        in_dims |= {"x and parameters": (0,) * len(inputs), "parameters": (None, *[0] * rest)}
    for words, dims in in_dims.items():
        _vmap(estimator, f"{words} batched: ", inputs, many, dims)
    return f"output and gradients, batched in {len(in_dims)} ways"


def _vmap(estimator: Estimator, words: str, inputs: Inputs, many: Inputs, dims: tuple[int | None, ...]) -> None:
    batched = [one if dim is None else all_.movedim(0, dim) for one, all_, dim in zip(inputs, many, dims, strict=True)]
    singles = [
        tuple(one if dim is None else all_[k] for one, all_, dim in zip(inputs, many, dims, strict=True))
        for k in range(COPIES)
    ]
    looped = [estimator.gradients(single) for single in singles]
    outputs = torch.stack([y for y, _ in looped])
    cotangent = uneven(looped[0][0])

    def loss(*tensors: Tensor) -> Tensor:
        return torch.sum(estimator.function(*tensors) * cotangent)

    with raising(f"{words}torch.func.vmap "):
        together = torch.func.vmap(estimator.function, in_dims=dims, randomness="same")(*batched)
    estimator.require_close(f"{words}output", together, outputs)
    slots = tuple(range(len(inputs)))
    with raising(f"{words}torch.func.vmap of torch.func.grad "):
        got = torch.func.vmap(torch.func.grad(loss, argnums=slots), in_dims=dims, randomness="same")(*batched)
    expected = [filled(gradients, single) for (_, gradients), single in zip(looped, singles, strict=True)]
    for slot in slots:
        looped_slot = torch.stack([each[slot] for each in expected])
        estimator.require_close(f"{words}gradient of slot {slot}", got[slot], looped_slot)


def check_jvp(estimator: Estimator, inputs: Inputs) -> str:
    """Check `torch.func.jvp`, dual tensors, `jacfwd` and `jacrev`."""
    slots = range(len(inputs))
    with warnings_ignored("`torch.jit.script` is"):  # torch's own, when it loads its decompositions
        for moved in [tuple(slots), *((slot,) for slot in slots if len(inputs) > 1)]:
            tangents = [uneven(tensor, slot + 5) if slot in moved else None for slot, tensor in enumerate(inputs)]
            expected = estimator.declared_tangent(inputs, tangents)
            for name, push in (("torch.func.jvp", _func_jvp), ("torch.autograd.forward_ad", _dual_jvp)):
                words = f"{name} along {slots_in_words(moved)}"
                with raising(f"{words} "):
                    got = push(estimator.function, inputs, tangents)
                estimator.require_close(words, got, expected, inputs[0])
        jacobians = _check_jacobians(estimator, inputs)
    return f"jvp and dual tensors; {jacobians}"


def _func_jvp(function: Callable[..., Any], inputs: Inputs, tangents: Sequence[Tensor | None]) -> Tensor:
    moved = [slot for slot, tangent in enumerate(tangents) if tangent is not None]

    def of_moved(*tensors: Tensor) -> Any:  # jvp wants a tangent for every argument, so the others are bound
        given = dict(zip(moved, tensors, strict=True))
        return function(*(given.get(slot, tensor) for slot, tensor in enumerate(inputs)))

    primals = tuple(inputs[slot] for slot in moved)
    tangent: Tensor = torch.func.jvp(of_moved, primals, tuple(t for t in tangents if t is not None))[1]
    return tangent


def _dual_jvp(function: Callable[..., Any], inputs: Inputs, tangents: Sequence[Tensor | None]) -> Tensor:
    with forward_ad.dual_level():
        pairs = zip(inputs, tangents, strict=True)
        duals = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]  # type: ignore[no-untyped-call]
        y, tangent = forward_ad.unpack_dual(function(*duals))  # type: ignore[no-untyped-call]
        return torch.zeros_like(y) if tangent is None else tangent  # None: no tangent reached the output


def _check_jacobians(estimator: Estimator, inputs: Inputs) -> str:
    # jacfwd has the declared tangents as columns, jacrev the declared gradients as rows
    inputs = _small(estimator, inputs)
    y = estimator.output(inputs)
    if max(tensor.numel() for tensor in (y, *inputs)) > LARGEST_JACOBIAN:
        return f"no Jacobians, which are for {LARGEST_JACOBIAN} elements at most"
    slots = tuple(range(len(inputs)))
    with raising("torch.func.jacrev "):
        by_rows = torch.func.jacrev(estimator.function, argnums=slots)(*inputs)
    rows = [filled(estimator.declared_gradients(inputs, one), inputs) for one in _units(y)]
    with raising("torch.func.jacfwd "):
        by_columns = torch.func.jacfwd(estimator.function, argnums=slots, randomness="same")(*inputs)
    for slot, x in enumerate(inputs):
        expected = torch.stack([row[slot] for row in rows]).reshape(*y.shape, *x.shape)
        estimator.require_close(f"torch.func.jacrev for slot {slot}", by_rows[slot], expected)
        moves = [[one if other == slot else None for other in slots] for one in _units(x)]
        columns = [estimator.declared_tangent(inputs, tangents) for tangents in moves]
        expected = torch.stack(columns, dim=-1).reshape(*y.shape, *x.shape)
        estimator.require_close(f"torch.func.jacfwd for slot {slot}", by_columns[slot], expected)
    return f"Jacobians of {plural(y.numel(), 'element')}"


def _small(estimator: Estimator, inputs: Inputs) -> Inputs:
    # a few values of x, if no other input depends on its shape
    x, parameters = inputs[0], inputs[1:]
    if not estimator.elementwise or x.numel() <= SMALL or any(p.numel() > 1 for p in parameters):
        return inputs
    chosen = torch.linspace(0, x.numel() - 1, SMALL).long()
    return x.flatten()[chosen], *parameters


def _units(like: Tensor) -> list[Tensor]:
    return list(torch.eye(like.numel(), dtype=torch.float64).reshape(-1, *like.shape))
