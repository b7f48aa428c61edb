"""Smooth steps: a sigmoid a unit in the forward (soft_round) or backward (DSQ)."""

import math
from typing import Any

import torch
from torch import Tensor

from qat.functional.tensors import (
    STEFunction,
    apply,
    as_dtype,
    require_floating,
    setting_beside,
    sum_to_shape,
    tensor_beside,
    widened,
)


def centred_fraction(x: Tensor) -> Tensor:
    """Return x - floor(x) - 1/2, in [-1/2, 1/2]. Its derivative is 1.

    >>> centred_fraction(torch.tensor([2.0, 2.75, -0.25])).tolist()
    [-0.5, 0.25, 0.25]
    """
    # An infinite x counts as an integer: inf - inf would be NaN.
    return torch.where(x.isinf(), 0, x - torch.floor(x)) - 0.5


def slope_of_step(d: Tensor, temperature: Tensor) -> Tensor:
    """Return the derivative by d of the smooth step tanh(T d / 2) / (2 tanh(T / 4)).

    T is the temperature. 1 - tanh(z)^2 is written 4 sigmoid(2z) sigmoid(-2z), which stays exact far from the middle.
    """
    z = temperature * d
    return temperature * torch.sigmoid(z) * torch.sigmoid(-z) / torch.tanh(temperature / 4)


def temperature_slope_of_step(d: Tensor, temperature: Tensor) -> Tensor:
    """Return the derivative by T of the smooth step tanh(T d / 2) / (2 tanh(T / 4)).

    T is the temperature. The two terms of the quotient rule cancel as T goes to 0 (1/T - 1/T against a result of the
    size of T). They combine to (d sinh(T/2) - sinh(T d)/2) / (8 sinh(T/4)^2 cosh(T d/2)^2), whose numerator is a
    difference of two series without their common first term. So that is the form below T = 1, and the quotient rule the
    one above, where sinh would overflow. `torch.where` picks, each form seeing temperatures of its own side only.
    """
    small = temperature < 1
    low = torch.where(small, temperature, 1)
    numerator = d * low / 2 * (_sinh_series(low.square() / 4) - _sinh_series((low * d).square()))
    from_series = numerator / (8 * (torch.sinh(low / 4) * torch.cosh(low * d / 2)).square())
    high = torch.where(small, 1, temperature)
    z, width = high * d, torch.tanh(high / 4)
    rising = d * torch.sigmoid(z) * torch.sigmoid(-z) / width
    falling = torch.tanh(z / 2) * torch.sigmoid(high / 2) * torch.sigmoid(-high / 2) / (2 * width.square())
    return torch.where(small, from_series, rising - falling)


def _sinh_series(square: Tensor) -> Tensor:
    # sinh(z)/z - 1 for z^2 up to 1/4, to float64's last digit: z^2/3! + z^4/5! + ... + z^14/15!, by Horner's rule
    total = square / math.factorial(15)
    for odd in (13, 11, 9, 7, 5, 3):
        total = square * (1 / math.factorial(odd) + total)
    return total


class SoftRoundFunction(STEFunction):
    """Round softly: a sigmoid from each integer to the next.

    Forward, with r = x - floor(x), T the temperature and sig the sigmoid:
                y = floor(x) + (sig(T (r - 1/2)) - sig(-T/2)) / (sig(T/2) - sig(-T/2))
    Backward:   dy/dx and dy/dT are the derivatives of exactly that.
    """

    @staticmethod
    def forward(x: Tensor, temperature: Tensor) -> Tensor:
        value, slope = widened(x, temperature)
        # the quotient is (1 + tanh(T (r - 1/2) / 2) / tanh(T/4)) / 2, exactly 0 at r = 0, for any T
        step = torch.tanh(slope * centred_fraction(value) / 2) / torch.tanh(slope / 4)
        return as_dtype(torch.floor(value) + (0.5 + 0.5 * step), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, temperature = ctx.saved_tensors
        value, steepness, grad = widened(x, temperature, grad)
        d = centred_fraction(value)
        grad_x = grad_temperature = None
        if ctx.needs_input_grad[0]:
            grad_x = sum_to_shape(grad * slope_of_step(d, steepness), x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            slope = grad * temperature_slope_of_step(d, steepness)
            grad_temperature = sum_to_shape(slope, temperature.shape).to(temperature.dtype)
        return grad_x, grad_temperature


class DSQRoundFunction(STEFunction):
    """Round, with the gradient of DSQ's soft staircase.

    Forward:    y = round(x), ties to even
    Backward, with r = x - floor(x), k = log(2/alpha - 1), s = 1/(1 - alpha) and phi(r) = (s tanh(k (r - 1/2)) + 1)/2:
                dy/dx     = phi'(r) = s k (1 - tanh(k (r - 1/2))^2) / 2
                dy/dalpha = dphi/dalpha

    As s = 1/tanh(k/2), phi is the step of `SoftRoundFunction` at the temperature 2k, and its slopes serve here:
    dphi/dalpha = dphi/dT dT/dalpha with dT/dalpha = -4 / (alpha (2 - alpha)).
    """

    @staticmethod
    def forward(x: Tensor, alpha: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, alpha = ctx.saved_tensors
        value, softness, grad = widened(x, alpha, grad)
        d = centred_fraction(value)
        temperature = 2 * torch.log1p(2 * (1 - softness) / softness)  # 2 log(2/alpha - 1), exact for alpha near 1 too
        grad_x = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad * slope_of_step(d, temperature)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            slope = temperature_slope_of_step(d, temperature) * (-4 / (softness * (2 - softness)))
            grad_alpha = sum_to_shape(grad * slope, alpha.shape).to(alpha.dtype)
        return grad_x, grad_alpha


def soft_round(x: Tensor, temperature: Tensor | float) -> Tensor:
    """Round softly: a smooth staircase between the identity and rounding.

    y is that of `SoftRoundFunction`: continuous with its first derivative, increasing, with integers where they are;
    T -> 0 gives the identity, T -> infinity gives round(x) (on ties: the middle). The gradients are its own, no
    estimates.

    Args:
        x: in units of the grid's step.
        temperature: steepness of the steps, > 0, exact from 1e-3 to 1e4; a number, or a tensor that broadcasts with
            x, which gets a gradient.

    Returns:
        Tensor of the dtype of x and the shape that x and temperature broadcast to.

    Source: Yang et al., "Quantization Networks", arXiv:1911.09464. Deviation: there a sum of sigmoids with learned
    places, which only approaches the levels; here one sigmoid a unit step, normalised to reach them exactly.

    >>> x = torch.tensor([1.0, 1.25, 1.5, 2.0], requires_grad=True)
    >>> y = soft_round(x, 8.0)
    >>> y.sum().backward()
    >>> [round(value, 3) for value in y.tolist()], [round(slope, 3) for slope in x.grad.tolist()]
    ([1.0, 1.105, 1.5, 2.0], [0.147, 0.871, 2.075, 0.147])
    """
    require_floating(x, "soft_round")
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ValueError(f"soft_round: temperature must be positive and finite, got {temperature}")
    return apply(SoftRoundFunction, x, tensor_beside(x, temperature))


def dsq_round(x: Tensor, alpha: Tensor | float) -> Tensor:
    """Round to the nearest integer, with the gradient of DSQ's soft staircase.

    y = round(x), ties to even; the gradients are those of `DSQRoundFunction`. alpha -> 1 makes the staircase the
    identity (dy/dx = 1), alpha -> 0 makes it the rounding itself.

    Args:
        x: in units of the grid's step.
        alpha: softness of the steps, 0 < alpha < 1; a number, or a tensor of shape () or broadcastable to x, which
            gets a gradient.

    Source: Gong et al., "Differentiable Soft Quantization", arXiv:1908.05033, in units of the step (Delta = 1).

    >>> x = torch.tensor([1.0, 1.25, 1.5], requires_grad=True)
    >>> y = dsq_round(x, 0.2)
    >>> y.sum().backward()
    >>> y.tolist(), [round(slope, 3) for slope in x.grad.tolist()]
    ([1.0, 1.0, 2.0], [0.494, 1.03, 1.373])
    """
    require_floating(x, "dsq_round")
    if not isinstance(alpha, Tensor) and not 0 < alpha < 1:
        raise ValueError(f"dsq_round: alpha must lie between 0 and 1, got {alpha}")
    return apply(DSQRoundFunction, x, setting_beside(x, alpha, "alpha", "dsq_round"))
