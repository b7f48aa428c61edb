"""Backward passes made of kernels: they have a first derivative, and say so when a second one is asked for."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qat.torch_internals import is_batched

Backward = Callable[..., tuple[Tensor | None, ...]]


class _EndFunction(torch.autograd.Function):
    """The identity, behind which nothing can be differentiated.

    Forward:    y = x
    Backward:   an error
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, origin: Tensor) -> Tensor:
        """A view, so that autograd sees another tensor."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Say what to do."""
        raise RuntimeError(
            "a prepared model on kernels has first derivatives only; for second ones run its forward in"
            " `with qat.kernels.plain_formulas():`"
        )


def first_derivative(backward: Backward) -> Backward:
    """Decorator for a Function's backward that calls kernels.

    Raises:
        RuntimeError: for several gradients at once, and when its result is differentiated again (not when that is
            merely prepared by create_graph=True).
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
