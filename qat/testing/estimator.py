"""`Estimator`, the subject of every check: its gradients, and those that it declares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qat.testing.report import first_wrong, uneven

Gradients = tuple[Tensor | None, ...]
Inputs = tuple[Tensor, ...]

LEADING = (2, 3, 2, 2)  # lengths of the axes that `with_axes` adds


@dataclass(frozen=True)
class Estimator:
    """Function with the gradient that it declares: the arguments of `ste_gradcheck`."""

    function: Callable[..., Any]
    surrogate: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    broadcast: tuple[int, ...] = ()
    elementwise: bool = True
    backend: Any = "aot_eager"
    rtol: float = 1e-8
    atol: float = 1e-10

    def output(self, inputs: Inputs) -> Tensor:
        """Return the function's value, without a graph."""
        with torch.no_grad():
            result: Tensor = self.function(*(tensor.detach() for tensor in inputs))
        return result

    def gradients(self, inputs: Inputs, cotangent: Tensor | None = None) -> tuple[Tensor, Gradients]:
        """Return the function's value and the gradients of all slots."""
        leaves = as_leaves(inputs)
        y = self.function(*leaves)
        cotangent = uneven(y).to(y.dtype) if cotangent is None else cotangent
        return y.detach(), pull_back(y, leaves, cotangent)

    def results(self, inputs: Inputs, cotangent: Tensor | None = None) -> tuple[Any, ...]:
        """Return the function's value and the gradients in one tuple."""
        y, gradients = self.gradients(inputs, cotangent)
        return y, *gradients

    def declared_gradients(self, inputs: Inputs, cotangent: Tensor) -> Gradients:
        """Return the gradients that the function's backward claims to be."""
        return self._declared(as_leaves(inputs), cotangent, create_graph=False)

    def second_order(self, inputs: Inputs, cotangent: Tensor, declared: bool) -> list[tuple[Tensor, ...]]:
        """Differentiate each gradient again, by every input and the cotangent."""
        leaves, cotangent = as_leaves(inputs), cotangent.detach().requires_grad_()
        by, rows = (*leaves, cotangent), []
        if declared:
            first = self._declared(leaves, cotangent, create_graph=True)
        else:
            first = pull_back(self.function(*leaves), leaves, cotangent, create_graph=True)
        for slot, gradient in enumerate(first):
            found: Gradients = (None,) * len(by)
            if gradient is not None and gradient.requires_grad:
                # Summed with uneven weights first, which keeps it one backward a slot.
                total = (gradient * uneven(gradient, seed=slot + 1)).sum()
                found = torch.autograd.grad(total, by, allow_unused=True, retain_graph=True)
            rows.append(filled(found, by))
        return rows

    def declared_tangent(self, inputs: Inputs, tangents: Sequence[Tensor]) -> Tensor:
        """Return the declared tangent of the output."""
        # The transpose of the declared gradients, at a cotangent of zero: they are linear in it.
        leaves, cotangent = as_leaves(inputs), torch.zeros_like(self.output(inputs)).requires_grad_()
        pulled = self._declared(leaves, cotangent, create_graph=True)
        terms = [(g * t).sum() for g, t in zip(pulled, tangents, strict=True) if g is not None]
        total = sum(terms, start=torch.zeros((), dtype=torch.float64))
        return filled(pull_back(total, [cotangent], torch.ones_like(total)), [cotangent])[0]

    def require_close(
        self, what: str, got: Tensor, expected: Tensor, x: Tensor | None = None, size: float = 1.0,
        rtol: float | None = None, atol: float | None = None,
    ) -> None:  # fmt: skip
        """Raise if two tensors differ, with the first element; `size` is of the terms they are made of."""
        rtol, atol = self.rtol if rtol is None else rtol, self.atol * max(1.0, size) if atol is None else atol
        if (wrong := first_wrong(got, expected, rtol, atol, x)) is not None:
            raise wrong.error(what)

    def require_same(self, words: str, got: Gradients, expected: Gradients, inputs: Inputs) -> None:
        """Compare an output and the gradients of all slots, or these alone; None is zero."""
        first = len(inputs) - len(got)
        pairs = zip(filled(got, expected), filled(expected, got), strict=True)
        for slot, pair in enumerate(pairs, start=first):
            what = f"gradient of slot {slot}" if slot >= 0 else "output"
            self.require_close(f"{words}{what}", *pair, inputs[0])

    def with_axes(self, x: Tensor, axes: int) -> Tensor:
        """Repeat x along new leading axes, up to `axes` axes, for elementwise functions."""
        if not self.elementwise or x.ndim >= axes:
            return x
        return x.expand(*LEADING[: axes - x.ndim], *x.shape).contiguous()

    def _declared(self, leaves: list[Tensor], cotangent: Tensor, create_graph: bool) -> Gradients:
        if self.surrogate is not None:
            return pull_back(self.surrogate(*leaves), leaves, cotangent, create_graph)
        assert self.gradient is not None
        found = self.gradient(cotangent, *leaves)
        if not isinstance(found, tuple) or len(found) != len(leaves):
            kind = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
            raise ValueError(
                f"ste_gradcheck: gradient must return a tuple with one gradient or None for each of the {len(leaves)} "
                f"inputs, got {kind}"
            )
        return tuple(_fitted(each, leaf, slot) for slot, (each, leaf) in enumerate(zip(found, leaves, strict=True)))


def as_leaves(inputs: Sequence[Tensor], wanted: Sequence[bool] | None = None) -> list[Tensor]:
    """Return leaves of a new graph on the same memory, strides included."""
    wanted = [True] * len(inputs) if wanted is None else wanted
    return [tensor.detach().requires_grad_(asks) for tensor, asks in zip(inputs, wanted, strict=True)]


def pull_back(y: Tensor, leaves: Sequence[Tensor], cotangent: Tensor, create_graph: bool = False) -> Gradients:
    """Return the gradient of every leaf; None if it has or requires none."""
    asking = [leaf for leaf in leaves if leaf.requires_grad]
    if not asking or not y.requires_grad:
        return (None,) * len(leaves)
    found = iter(torch.autograd.grad(y, asking, cotangent, create_graph=create_graph, allow_unused=True))
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


def filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients, with zeros in place of None."""
    zeros = (torch.zeros(()) if each is None else torch.zeros_like(each) for each in like)
    return tuple(zero if gradient is None else gradient for gradient, zero in zip(gradients, zeros, strict=True))


def _fitted(gradient: Tensor | None, leaf: Tensor, slot: int) -> Tensor | None:
    try:
        return None if gradient is None else gradient.to(leaf.dtype).sum_to_size(leaf.shape)
    except RuntimeError:  # torch's own text names no slot
        raise ValueError(
            f"ste_gradcheck: gradient returns shape {tuple(gradient.shape) if gradient is not None else ()} for slot"
            f" {slot}, which has shape {tuple(leaf.shape)}"
        ) from None
