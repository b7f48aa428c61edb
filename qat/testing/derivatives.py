"""Checks of gradients: each compares an estimator with what it declares, or with autograd."""

import itertools

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from qat.contexts import warnings_ignored
from qat.testing.estimator import Estimator, Gradients, Inputs, as_leaves, filled, pull_back
from qat.testing.report import GradcheckError, Skipped, first_wrong, index_of, largest, number, raising, uneven
from qat.text import plural
from qat.torch_internals import applied_function

COPIES = 3  # samples of a batch under vmap
MOST_BLAMED = 2000  # elements that are tried alone to find the wrong one


def check_gradient(estimator: Estimator, inputs: Inputs) -> str:
    """Check that every slot's gradient equals the declared one, None included."""
    y, got = estimator.gradients(inputs)
    expected = estimator.declared_gradients(inputs, uneven(y))
    require_same_nones("", got, expected, "but its declared gradient is")
    _require_declared(estimator, "", inputs, got, expected)
    return f"{plural(len(inputs), 'slot')} at {plural(inputs[0].numel(), 'value')} of x"


def require_same_nones(words: str, got: Gradients, expected: Gradients, other: str) -> None:
    """Raise if a slot gets a gradient in one of both alone."""
    for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if (mine is None) != (theirs is None):
            found, wanted = ("no", "not None") if mine is None else ("a", "None")
            raise GradcheckError(f"{words}slot {slot} gets {found} gradient, {other} {wanted}")


def _require_declared(estimator: Estimator, words: str, inputs: Inputs, got: Gradients, expected: Gradients) -> None:
    try:
        estimator.require_same(words, got, expected, inputs)
    except GradcheckError as failure:
        raise _of_one_element(estimator, words, inputs) or failure from None


def _of_one_element(estimator: Estimator, words: str, inputs: Inputs) -> GradcheckError | None:
    # The first element of the output whose own gradient is wrong says more than a parameter's sum.
    x, whole = inputs[0], uneven(estimator.output(inputs))
    for place in range(min(whole.numel(), MOST_BLAMED)):
        one, index = torch.zeros_like(whole), index_of(place, whole.shape)
        one[index] = 1.0
        mine = filled(estimator.gradients(inputs, one)[1], inputs)
        theirs = filled(estimator.declared_gradients(inputs, one), inputs)
        there = f", where x = {number(x[index])}" if x.shape == whole.shape else ""
        for slot, pair in enumerate(zip(mine, theirs, strict=True)):
            if (wrong := first_wrong(*pair, estimator.rtol, estimator.atol)) is not None:
                return GradcheckError(f"{words}d y{list(index)} / d slot {slot}{wrong.at}{there}: {wrong.values}")
    return None


def check_slots(estimator: Estimator, inputs: Inputs) -> str:
    """Check that each subset of slots gets the same gradients, and no others."""
    y, full = estimator.gradients(inputs)
    subsets = list(itertools.product((False, True), repeat=len(inputs)))
    for wanted in subsets:
        asking = [str(slot) for slot, asks in enumerate(wanted) if asks]
        words = f"with gradients for slot {', '.join(asking) or 'none'} only: "
        leaves = as_leaves(inputs, wanted)
        own = estimator.function(*leaves)
        if own.requires_grad and not asking:
            raise GradcheckError(f"{words}the output requires a gradient")
        unasked = _watch(own)
        got = pull_back(own, leaves, uneven(own))
        expected = tuple(gradient if asks else None for gradient, asks in zip(full, wanted, strict=True))
        estimator.require_same(words, (own, *got), (y, *expected), (inputs[0], *inputs))
        if unasked:
            raise GradcheckError(f"{words}{unasked[0]} (see ctx.needs_input_grad)")
    return plural(len(subsets), "subset") + " of slots"


def _watch(y: Tensor) -> list[str]:
    # A list that backward fills with the gradients that a Function computes although no one needs them
    unasked: list[str] = []
    seen, ahead = set(), [y.grad_fn]
    while ahead:
        if (node := ahead.pop()) is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):

            def note(gradients: Gradients, _: object, node: BackwardCFunction = node) -> None:
                for place, (gradient, (reader, _)) in enumerate(zip(gradients, node.next_functions, strict=False)):
                    if gradient is not None and reader is None:
                        name = applied_function(node).__name__
                        unasked.append(f"{name} computes a gradient for its input {place}, which asks for none")

            node.register_hook(note)
    return unasked


def check_broadcast(estimator: Estimator, inputs: Inputs) -> str:
    """Check the slots in `broadcast` per tensor and per channel, together and alone."""
    if not estimator.broadcast:
        raise Skipped("no slot is named in broadcast")
    x = estimator.with_axes(inputs[0], 3)
    tails = [(channels,) + (1,) * (x.ndim - axis - 1) for axis, channels in enumerate(x.shape)]
    shapes = [(), (1,), *tails, *((1,) * (x.ndim - len(tail)) + tail for tail in tails[1:])]
    groups = dict.fromkeys([estimator.broadcast, *((slot,) for slot in estimator.broadcast)])
    for slots, shape in itertools.product(groups, shapes):
        shaped = [x, *inputs[1:]]
        for slot in estimator.broadcast:
            own = torch.Size(shape if slot in slots else ())
            factors = 1 + torch.arange(own.numel(), dtype=torch.float64) % 8 / 8  # 1, 9/8 .. 15/8
            shaped[slot] = (inputs[slot].flatten()[0] * factors).reshape(own)
        words = f"slot {', '.join(map(str, slots))} of shape {shape}: "
        with raising(words):
            y, got = estimator.gradients(tuple(shaped))
        if estimator.elementwise:
            wide = [each.expand(x.shape) if slot in estimator.broadcast else each for slot, each in enumerate(shaped)]
            estimator.require_close(f"{words}output", y, estimator.output(tuple(wide)), x)
        _require_declared(estimator, words, tuple(shaped), got, estimator.declared_gradients(tuple(shaped), uneven(y)))
    return f"{plural(len(groups) * len(shapes), 'shape')} against x of shape {tuple(x.shape)}"


def check_second_order(estimator: Estimator, inputs: Inputs) -> str:
    """Check the gradients, differentiated again by every slot and by the cotangent."""
    cotangent = uneven(estimator.output(inputs))
    got, expected = (estimator.second_order(inputs, cotangent, declared) for declared in (False, True))
    # Terms as large as the gradients cancel here.
    size = max(map(largest, estimator.declared_gradients(inputs, cotangent)))
    for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for by, pair in enumerate(zip(mine, theirs, strict=True)):
            name = f"slot {by}" if by < len(inputs) else "the incoming gradient"
            words = f"gradient of slot {slot} differentiated by {name}"
            estimator.require_close(words, *pair, inputs[0], size)
    return f"{plural(len(inputs), 'gradient')} differentiated by {plural(len(inputs) + 1, 'tensor')}"


def check_func_grad(estimator: Estimator, inputs: Inputs) -> str:
    """Check that `torch.func.vjp` equals autograd."""
    y, expected = estimator.gradients(inputs)
    with raising("torch.func.vjp "):
        value, pull = torch.func.vjp(estimator.function, *inputs)[:2]
        got = pull(uneven(y))
    estimator.require_same("torch.func.vjp: ", (value, *got), (y, *expected), (inputs[0], *inputs))
    return f"vjp for {plural(len(inputs), 'slot')}"


def check_vmap(estimator: Estimator, inputs: Inputs) -> str:
    """Check that `torch.func.vmap` of function and gradient equals a loop.

    Noise is drawn once for the whole batch, so that a function that seeds each call equals the loop too.
    """
    rest, cotangent = len(inputs) - 1, uneven(estimator.output(inputs))
    moved = [inputs[0].flatten().roll(k).reshape(inputs[0].shape) for k in range(COPIES)]
    many = [torch.stack(moved), *(torch.stack([p * (1 + k / 8) for k in range(COPIES)]) for p in inputs[1:])]

    def both(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, pull = torch.func.vjp(estimator.function, *tensors)[:2]
        return y, *pull(cotangent)

    ways = {"x": (0, *[None] * rest), "x and parameters": (0,) * len(inputs), "parameters": (None, *[0] * rest)}
    for name in ways if rest else ("x",):
        dims = ways[name]
        batched = [one if dim is None else all_ for one, all_, dim in zip(inputs, many, dims, strict=True)]
        with raising(f"{name} batched: torch.func.vmap "):
            got = torch.func.vmap(both, in_dims=dims, randomness="same")(*batched)
        for k in range(COPIES):
            single = tuple(each if dim is None else each[k] for each, dim in zip(batched, dims, strict=True))
            y, gradients = estimator.gradients(single)
            ours = tuple(each[k] for each in got)
            estimator.require_same(f"{name} batched: ", ours, (y, *gradients), (single[0], *single))
    return f"output and gradients, batched in {len(ways) if rest else 1} ways"


def check_jvp(estimator: Estimator, inputs: Inputs) -> str:
    """Check that `torch.func.jvp` is the transpose of the declared gradient."""
    slots = range(len(inputs))
    for moved in dict.fromkeys([tuple(slots), *((slot,) for slot in slots)]):
        pushed = [uneven(x, slot + 5) if slot in moved else torch.zeros_like(x) for slot, x in enumerate(inputs)]
        words = f"torch.func.jvp along slot {', '.join(map(str, moved))}"
        with raising(f"{words} "), warnings_ignored("`torch.jit.script` is"):  # torch's own, as it loads its rules
            got = torch.func.jvp(estimator.function, inputs, tuple(pushed))[1]
        estimator.require_close(words, got, estimator.declared_tangent(inputs, pushed), inputs[0])
    return f"jvp along {plural(len(inputs), 'slot')}"
