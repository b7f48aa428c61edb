"""`Case`: one estimator as a row of docs/estimators_matrix.md, with what it computes and what it claims."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[np.float64]

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
    reference: Callable[..., Array] = field(kw_only=True)
    reference_gradient: Callable[..., tuple[Array | None, ...]] = field(kw_only=True)
    broadcast: tuple[int, ...] = ()
    elementwise: bool = True
    levels: int | None = None
    excused: Mapping[str, str] = field(default_factory=dict)
