"""Checks under `torch.func` and in forward mode."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qat.silence import warnings_ignored
from qat.testing.comparison import uneven
from qat.testing.estimator import Estimator, Inputs, filled
from qat.testing.report import plural, raising
from qat.testing.variants import COPIES, batches

LARGEST_JACOBIAN = 64
SMALL = 8


def check_func_grad(estimator: Estimator, inputs: Inputs) -> str:
    """`torch.func.grad`, for all slots and for each alone, and `torch.func.vjp` equal autograd."""
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
    """`torch.func.vmap` of the function and of its gradient equals a loop, with x, parameters or both batched.

    Noise is drawn once for the whole batch, so that a function that seeds each call equals the loop too.
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
    """`torch.func.jvp`, dual tensors, `jacfwd` and `jacrev` agree with the declared gradient."""
    slots = range(len(inputs))
    with warnings_ignored("`torch.jit.script` is"):  # torch's own, when it loads its decompositions
        for moved in [tuple(slots), *((slot,) for slot in slots if len(inputs) > 1)]:
            tangents = [uneven(tensor, slot + 5) if slot in moved else None for slot, tensor in enumerate(inputs)]
            expected = estimator.declared_tangent(inputs, tangents)
            for name, push in (("torch.func.jvp", _func_jvp), ("torch.autograd.forward_ad", _dual_jvp)):
                words = f"{name} along slot{'s' if len(moved) > 1 else ''} {', '.join(map(str, moved))}"
                with raising(f"{words} "):
                    got = push(estimator.function, inputs, tangents)
                estimator.require_close(words, got, expected, inputs[0])
        jacobians = _check_jacobians(estimator, inputs)
    return f"jvp and dual tensors; {jacobians}"


def _func_jvp(function: Callable[..., Any], inputs: Inputs, tangents: Sequence[Tensor | None]) -> Tensor:
    moved = [slot for slot, tangent in enumerate(tangents) if tangent is not None]

    def of_moved(*tensors: Tensor) -> Any:
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
        return torch.zeros_like(y) if tangent is None else tangent


def _check_jacobians(estimator: Estimator, inputs: Inputs) -> str:
    """jacfwd has the declared tangents as columns, jacrev the declared gradients as rows."""
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
    """A few values of x, if no other input depends on its shape."""
    x, parameters = inputs[0], inputs[1:]
    if not estimator.elementwise or x.numel() <= SMALL or any(p.numel() > 1 for p in parameters):
        return inputs
    chosen = torch.linspace(0, x.numel() - 1, SMALL).long()
    return x.flatten()[chosen], *parameters


def _units(like: Tensor) -> list[Tensor]:
    return list(torch.eye(like.numel(), dtype=torch.float64).reshape(-1, *like.shape))
