"""`Case`: one estimator as a row of docs/estimators_matrix.md, with what it computes and claims."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.references.reference import Array, Rule

PROPERTIES = ("idempotent", "monotone", "levels", "zero", "outside")
"""idempotent: f(f(x)) = f(x); monotone: x <= x' gives f(x) <= f(x'); levels: at most `levels` distinct values;
zero: f(0) = 0 exactly; outside: where the reference gives x no gradient, its gradient is exactly 0."""


@dataclass(frozen=True)
class Case:
    """A row of the matrix.

    Attributes:
        name: the function's name, with its variant: "sign_ste, approximate".
        function: takes tensors and returns one tensor; other arguments are bound.
        inputs: float64; the first is x, with points inside, outside, on both bounds and on ties.
        surrogate: a differentiable torch function of the same tensors whose gradient the backward claims to be.
        gradient: replaces the surrogate if no function has the gradient: gradient(grad, *inputs) returns one
            gradient or None for each input, computed by differentiable operations.
        rule: gives `reference` and `reference_gradient`, its forward and backward.
        reference: forward in NumPy float64, from the published formula: arrays in, array out.
        reference_gradient: (grad, *arrays) -> tuple of arrays, element by element from the published formula.
        broadcast: slots of `inputs` that broadcast against x (scales, bounds): tried in every shape.
        elementwise: whether y[i] depends on x[i] and the parameters only.
        levels: the most distinct values of the output for parameters of one element; None: unbounded.
        excused: check or property -> why the published rule cannot have it (shown in the table as a footnote). It
            must have all others.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    surrogate: Callable[..., Tensor] | None = None
    gradient: Callable[..., tuple[Tensor | None, ...]] | None = None
    rule: Rule | None = None
    reference: Callable[..., Array] = field(default=None, kw_only=True)  # type: ignore[assignment]
    reference_gradient: Callable[..., tuple[Array | None, ...]] = field(default=None, kw_only=True)  # type: ignore[assignment]
    broadcast: tuple[int, ...] = ()
    elementwise: bool = True
    levels: int | None = None
    excused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule is not None:
            object.__setattr__(self, "reference", self.rule.forward)
            object.__setattr__(self, "reference_gradient", self.rule.backward)


def tensor(values: Any, *shape: int) -> Tensor:
    """Float64, in this shape if one is given."""
    y = torch.as_tensor(values, dtype=torch.float64)
    return y.reshape(shape) if shape else y


def straight_through(y: Tensor, x: Tensor) -> Tensor:
    return x + (y - x).detach()


def clip(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """A clip whose gradient is 1 on its bounds; that of torch.clamp there depends on the torch version."""
    return torch.where(x < low, low, torch.where(x > high, high, x))
