"""Clamping whose gradient at a bound does not depend on the torch version."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, check_known, require_floating, sum_to_shape, tensor_beside

ClampGradient = Literal["clipped", "straight_through"]


class ClampSTEFunction(STEFunction):
    """Clamp, with a gradient for the bounds too.

    Forward:     y = min(max(x, low), high)
    Backward:    dy/dx    = 1 where low <= x <= high, else 0 ("clipped"); 1 everywhere ("straight_through")
                 dy/dlow  = 1 where x < low <= high, else 0
                 dy/dhigh = 1 where x > high or low > high, else 0

    A value exactly on a bound counts as inside. The bounds are read in the dtype of x, so that what was clamped once
    lies inside, whatever the dtype.
    """

    @staticmethod
    def forward(x: Tensor, low: Tensor, high: Tensor, gradient: str) -> Tensor:
        # exact in every dtype: nothing is calculated
        return torch.clamp(x, low.to(x.dtype), high.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, low, high = ctx.saved_tensors
        (gradient,) = ctx.options
        bottom, top = low.to(x.dtype), high.to(x.dtype)
        grad_x = grad_low = grad_high = None
        if ctx.needs_input_grad[0]:
            inside = (bottom <= x) & (x <= top)
            passed = grad if gradient == "straight_through" else torch.where(inside, grad, 0)
            grad_x = sum_to_shape(passed, x.shape)
        wide = torch.promote_types(x.dtype, torch.float32)  # thousands of terms add up
        if ctx.needs_input_grad[1]:
            passed = torch.where((x < bottom) & (bottom <= top), grad.to(wide), 0)
            grad_low = sum_to_shape(passed, low.shape).to(low.dtype)
        if ctx.needs_input_grad[2]:
            passed = torch.where((x > top) | (bottom > top), grad.to(wide), 0)
            grad_high = sum_to_shape(passed, high.shape).to(high.dtype)
        return grad_x, grad_low, grad_high, None


def clamp_ste(x: Tensor, low: Tensor | float, high: Tensor | float, gradient: ClampGradient = "clipped") -> Tensor:
    """Clamp x to low .. high; bounds that are tensors can be learned.

    The gradients are those of `ClampSTEFunction`. That of `torch.clamp` on a bound is 1 or 0 by the torch version.

    Args:
        low, high: in the unit of x; numbers, or tensors that broadcast with x. Two numbers have to be in order; where
            a tensor low exceeds high, y is high, as in `torch.clamp`.
        gradient: "clipped": dy/dx = 1 where low <= x <= high, else 0; "straight_through": 1 everywhere.

    Returns:
        Tensor of the dtype of x and the shape that x and the bounds broadcast to.

    Source: Bengio et al., arXiv:1308.3432 (straight through); Choi et al., PACT, arXiv:1805.06085 (learned bound).

    >>> x = torch.tensor([-2.0, -1.0, 0.3, 5.0], requires_grad=True)
    >>> high = torch.tensor(2.0, requires_grad=True)
    >>> y = clamp_ste(x, -1.0, high)
    >>> y.sum().backward()
    >>> [round(value, 2) for value in y.tolist()], x.grad.tolist(), high.grad.item()
    ([-1.0, -1.0, 0.3, 2.0], [0.0, 1.0, 1.0, 0.0], 1.0)
    """
    check_known("gradient", gradient, get_args(ClampGradient), "clamp_ste")
    require_floating(x, "clamp_ste")
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not low <= high:
        raise ValueError(f"clamp_ste: low must be at most high, got low={low} and high={high}")
    return apply(ClampSTEFunction, x, tensor_beside(x, low), tensor_beside(x, high), gradient)
