"""Signs on two and three levels, with gradients to train such networks."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, as_dtype, check_known, require_floating, setting_beside, widened

SignGradient = Literal["clipped", "straight_through", "approximate"]
TernarySignGradient = Literal["clipped", "straight_through"]


def two_levels(x: Tensor) -> Tensor:
    """Return +1 where x >= 0 (zero of either sign included), -1 below, NaN for NaN.

    >>> two_levels(torch.tensor([-0.3, -0.0, 0.0, 2.0])).tolist()
    [-1.0, 1.0, 1.0, 1.0]
    """
    return torch.where(x >= 0, 1.0, torch.where(x < 0, -1.0, x))  # `torch.sign` would make NaN 0


def approximate_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad * (2 - 2|x|) where |x| <= 1, else 0 (Bi-Real Net), in x's dtype."""
    value, grad = widened(x, grad)
    inside = x.abs() <= 1
    slope = 2 - 2 * torch.where(inside, value, 0).abs()  # finite outside too: 0 * inf is NaN when differentiated
    return torch.where(inside, grad * slope, 0).to(x.dtype)


def error_decay_gradient(grad: Tensor, x: Tensor, progress: Tensor) -> Tensor:
    """Return IR-Net's gradient, in the dtype of x.

    grad * k t (1 - tanh(t x)^2) with t = 0.1 * 10^(2 progress), k = max(1/t, 1).
    1 - tanh(z)^2 is written 4 sigmoid(2z) sigmoid(-2z): the difference has no digits left in the tails.
    """
    value, done, grad = widened(x, progress.detach(), grad)
    t = 0.1 * torch.pow(10.0, 2 * done)
    z = t * value
    slope = 4 * torch.sigmoid(2 * z) * torch.sigmoid(-2 * z)
    return (grad * (torch.clamp(t, min=1) * slope)).to(x.dtype)  # k t = max(1/t, 1) t


class SignGradientFunction(STEFunction):
    """Base of the signs: only x gets a gradient, that of the given name.

    The inputs are x, whatever the levels need, the name, and the progress of "error_decay" (None for others).
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *_, ctx.gradient, progress = inputs
        if ctx.gradient != "straight_through":  # which needs no x
            ctx.save_for_backward(x, progress)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        others = (None,) * (len(ctx.needs_input_grad) - 1)  # no gradient for what makes the levels
        if not ctx.needs_input_grad[0]:
            return None, *others
        if ctx.gradient == "straight_through":
            return grad, *others
        x, progress = ctx.saved_tensors
        if ctx.gradient == "error_decay":
            return error_decay_gradient(grad, x, progress), *others
        if ctx.gradient == "approximate":
            return approximate_gradient(grad, x), *others
        return torch.where(x.abs() <= 1, grad, 0), *others  # clipped: BinaryConnect, XNOR-Net


class SignSTEFunction(SignGradientFunction):
    """y = 1 where x >= 0, else -1; gradients of `sign_ste`, `error_decay_sign`."""

    @staticmethod
    def forward(x: Tensor, gradient: str, progress: Tensor | None) -> Tensor:
        return two_levels(x)


class TernarySignSTEFunction(SignGradientFunction):
    """y = 0 where |x| <= threshold, else sign(x); gradients of `ternary_sign_ste`."""

    @staticmethod
    def forward(x: Tensor, threshold: Tensor, gradient: str, progress: None) -> Tensor:
        value, threshold = widened(x, threshold)
        size = value.abs()
        # both comparisons are false only where x or the threshold is NaN, and then so is their sum
        small = torch.where(size <= threshold, 0.0, value + threshold)
        return as_dtype(torch.where(size > threshold, torch.sign(value), small), x.dtype)


def sign_ste(x: Tensor, gradient: SignGradient = "clipped") -> Tensor:
    """Take the sign on two levels: +1 where x >= 0, else -1.

    Args:
        gradient: "clipped": dy/dx = 1 where |x| <= 1, else 0; "straight_through": 1 everywhere;
            "approximate": 2 - 2|x| where |x| <= 1, else 0, the slope of a parabola drawn through the step.

    Source: Hubara et al., arXiv:1602.02830 (clipped); Bengio et al., arXiv:1308.3432 (straight through); Liu et al.,
    Bi-Real Net, arXiv:1808.00278 (approximate).

    >>> x = torch.tensor([-2.0, -0.25, 0.0, 1.0], requires_grad=True)
    >>> y = sign_ste(x, gradient="approximate")
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([-1.0, -1.0, 1.0, 1.0], [0.0, 1.5, 2.0, 0.0])
    """
    check_known("gradient", gradient, get_args(SignGradient), "sign_ste")
    return apply(SignSTEFunction, require_floating(x, "sign_ste"), gradient, None)


def error_decay_sign(x: Tensor, progress: Tensor | float) -> Tensor:
    """Take the sign with a gradient that sharpens from the identity's to the sign's.

    y = 1 where x >= 0, else -1; dy/dx = k t (1 - tanh(t x)^2) with t = 0.1 * 10^(2 progress) and k = max(1/t, 1).

    Args:
        progress: how much of the training is done, 0..1; a tensor () (which compiled code reads anew each time) or a
            number. No gradient.

    Source: Qin et al., IR-Net, arXiv:1909.10788 (the error decay estimator; its weight balancing is not part of it).

    >>> x = torch.tensor([-0.25, 0.0, 3.0], requires_grad=True)
    >>> y = error_decay_sign(x, torch.tensor(0.5))
    >>> y.sum().backward()
    >>> y.tolist(), [round(slope, 3) for slope in x.grad.tolist()]
    ([-1.0, 1.0, 1.0], [0.94, 1.0, 0.01])
    """
    require_floating(x, "error_decay_sign")
    if not isinstance(progress, Tensor) and not 0 <= progress <= 1:
        raise ValueError(f"error_decay_sign: progress must lie in 0..1, got {progress}")
    done = setting_beside(x, progress, "progress", "error_decay_sign")
    return apply(SignSTEFunction, x, "error_decay", done)


def ternary_sign_ste(x: Tensor, threshold: Tensor | float = 0.5, gradient: TernarySignGradient = "clipped") -> Tensor:
    """Take the sign on three levels: 0 where |x| <= threshold, else the sign of x.

    Args:
        threshold: >= 0, in the unit of x; a number, or a tensor of shape () or broadcastable to x. No gradient.
        gradient: "clipped": dy/dx = 1 where |x| <= 1, else 0; "straight_through": 1 everywhere.

    Source: Li et al., Ternary Weight Networks, arXiv:1605.04711, for the levels; gradients as in `sign_ste`.

    >>> x = torch.tensor([-2.0, -0.5, 0.25, 0.75], requires_grad=True)
    >>> y = ternary_sign_ste(x)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([-1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0])
    """
    check_known("gradient", gradient, get_args(TernarySignGradient), "ternary_sign_ste")
    require_floating(x, "ternary_sign_ste")
    if not isinstance(threshold, Tensor) and not threshold >= 0:
        raise ValueError(f"ternary_sign_ste: threshold must be at least 0, got {threshold}")
    border = setting_beside(x, threshold, "threshold", "ternary_sign_ste")
    return apply(TernarySignSTEFunction, x, border, gradient, None)
