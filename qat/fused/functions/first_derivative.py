"""Backward passes that call kernels raise an error if they are differentiated themselves."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qat.torch_internals import is_batched

Backward = Callable[..., tuple[Tensor | None, ...]]


class _EndFunction(torch.autograd.Function):
    """The identity, with a backward that raises an error.

    Forward:    y = x
    Backward:   an error
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, origin: Tensor) -> Tensor:
        """A view, so that autograd records a new tensor."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raise an error that names the way out."""
        raise RuntimeError(
            "a prepared model on kernels has first derivatives only; for second ones run its forward in"
            " `with qat.kernels.plain_formulas():`"
        )


def first_derivative(backward: Backward) -> Backward:
    """Decorator for a Function's backward that calls kernels.

    Raises:
        RuntimeError: for several gradients at once, and if its result is differentiated again; create_graph=True
            alone raises nothing.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # which has no second derivatives, and says so itself
            return backward(ctx, grad)
        if is_batched(grad):
            raise RuntimeError(
                "a prepared model on kernels takes one gradient at a time (is_grads_batched, jacobian(vectorize=True));"
                " for many at once run its forward in `with qat.kernels.plain_formulas():`"
            )
        again = torch.is_grad_enabled()
        with torch.no_grad():
            found = backward(ctx, grad)
        if not again:
            return found
        origin = grad if grad.requires_grad else torch.zeros((), requires_grad=True)
        return tuple(None if gradient is None else _EndFunction.apply(gradient, origin) for gradient in found)

    return wrapped
