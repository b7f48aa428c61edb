"""Runs a training step without the optimizer, and compares the results of two."""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, fx, nn

from qat.torch_internals import buffers_of, hooks_of, pytree

TOLERANCE, NEGLIGIBLE = 1e-3, 1e-5
"""Largest differences: relative to a tensor's norm, and to that of all gradients."""

GRADIENT = "the gradient of"

_Module = TypeVar("_Module", bound=nn.Module)


Results = dict[str, Tensor]
"""Results of a step: answers, gradients of parameters and inputs, and buffers."""


class NoGradientsError(Exception):
    """The model's forward runs, and its backward does not; torch's error is the cause."""


def training_step(interpreter: fx.Interpreter, inputs: list[object]) -> Results:
    """Run a graph forward and backward; the state of its module may change."""
    model = interpreter.module
    wanted: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copied = pytree.tree_map(detached, inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted |= {f"input {number}": leaf for number, leaf in enumerate(leaves)}
    # Clones are no leaves: the model may write into its inputs.
    copied = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, copied)
    answers = [leaf for leaf in pytree.tree_leaves(interpreter.run(*copied)) if isinstance(leaf, Tensor)]
    try:
        gradients = _gradients(answers, wanted)
    except Exception as error:
        raise NoGradientsError from error
    found = {f"answer {number}": y.detach() for number, y in enumerate(answers)}
    found |= {f"{GRADIENT} {name}": gradient for name, gradient in gradients.items()}
    return found | {f"the buffer {name}": buffer for name, buffer in model.named_buffers()}


def _gradients(answers: list[Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    # Of the sum of all outputs, every element with a weight of its own, so that no error cancels another.
    parts = [torch.view_as_real(y) if y.is_complex() else y for y in answers if y.requires_grad]
    if not parts or not wanted:
        return {}
    loss = cast("Tensor", sum((noise(y) * y).sum() for y in parts))
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}


def detached(x: object) -> object:
    """Return a copy of a tensor as a leaf of autograd."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def noise(y: Tensor) -> Tensor:
    """Return random numbers in a tensor's shape, the same at every call."""
    generator = torch.Generator("cpu").manual_seed(y.numel())  # the user's own random numbers are left alone
    return torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype)


def copied(model: _Module) -> _Module:
    """Return a copy of a model without hooks, but with those that compute its weights."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for hooks in hooks_of(module):
            kept = {key: hook for key, hook in hooks.items() if type(hook).__module__.startswith("torch.nn.utils.")}
            memo[id(hooks)] = type(hooks)(kept)
        for tensor in (*vars(module).values(), *buffers_of(module).values()):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:  # a weight that a hook computed
                memo[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """Take gradients in this context without a hook seeing the saved tensors."""
    with torch.enable_grad(), contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # hooks are disabled here, so there are none
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


def difference(expected: Results, found: Results) -> str | None:
    """Return how the second step differs by more than the order of sums, or None."""
    for name in sorted(expected.keys() ^ found.keys()):
        return f"{name} is missing" if name in expected else f"{name} should not exist"
    norms = [_norm(tensor) for name, tensor in expected.items() if name.startswith(GRADIENT)]
    negligible = NEGLIGIBLE * max(filter(math.isfinite, norms), default=0.0)
    for name, tensor in expected.items():
        gap = gap_between(tensor, found[name], 1e-7 + negligible * name.startswith(GRADIENT))
        if gap is not None:
            return f"{name} {gap}"
    return None


def gap_between(expected: Tensor, found: Tensor, least: float, share: float = TOLERANCE) -> str | None:
    """Return how far two tensors are apart beyond a share of the first and `least`."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(expected, found):
        return None
    gap, size = _norm(expected - found), _norm(expected)
    if not math.isfinite(gap + size):
        finite = expected.isfinite()
        same = torch.equal(expected[~finite].nan_to_num(), found[~finite].nan_to_num())
        if not same or not torch.equal(finite, found.isfinite()):
            return f"has {int((~found.isfinite()).sum())} values that are not finite instead of {int((~finite).sum())}"
        gap, size = _norm(expected[finite] - found[finite]), _norm(expected[finite])
    return None if gap <= share * size + least else f"differs by {gap / max(size, 1e-30):.2g} of its length"


def _norm(x: Tensor) -> float:
    # In float64, which does not overflow.
    wide = x if x.is_floating_point() or x.is_complex() else x.double()
    return float(torch.linalg.vector_norm(wide, dtype=torch.complex128 if x.is_complex() else torch.float64))
