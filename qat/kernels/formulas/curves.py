"""Formulas that apply an activation function or softmax and quantize the result; see `qat.kernels.operators.curves`.

The functions are torch's own. Like those of the C kernels they are accurate to a few units in the last place, so a
value next to a tie may round to the other level.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qat.kernels.cpu.quantizers import in_layout_of
from qat.kernels.formulas.grids import codes_of, grid_of, learned_gradient, slopes_on


def gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """x * Phi(x), and Phi(x) + x * phi(x); computed with erfc, which keeps its precision far below zero."""
    share = torch.special.erfc(x * -math.sqrt(0.5)) * 0.5
    return x * share, share + x * (torch.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)))


def gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """x * s and s + x * s * (1 - s) * u', with s = sigmoid(u), u = 2 sqrt(2 / pi) (x + 0.044715 x^3).

    (1 + tanh(v)) / 2 = sigmoid(2 v). Beyond +-20 s is 0 or 1, and x^3 could overflow.
    """
    near, twice = x.clamp(-20.0, 20.0), 2 * math.sqrt(2 / math.pi)
    square = near * near
    share = torch.sigmoid(twice * (near + 0.044715 * (near * square)))
    return x * share, share + x * share * (1 - share) * (twice * (1 + 3 * 0.044715 * square))


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """x * s, and s + x * s * (1 - s), with s = sigmoid(x)."""
    share = torch.sigmoid(x)
    return x * share, share + x * share * (1 - share)


def hardswish(x: Tensor) -> tuple[Tensor, Tensor]:
    """x * clamp(x + 3, 0, 6) / 6, and its slope: x / 3 + 1/2 between -3 and 3."""
    rise = torch.where(x <= -3, 0.0, torch.where(x < 3, x * (1 / 3) + 0.5, 1.0))
    return x * (x + 3).clamp(0.0, 6.0) / 6, rise


CURVES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "hardswish": hardswish,
}  # fmt: skip
"""By name: a function of a float32 tensor that returns the activation's value and its slope."""


def curve_quantize(x: Tensor, curve: str, grid: list[Any], levels: list[float]) -> tuple[Tensor, Tensor]:
    """Codes of curve(x); curve is one of `CURVES`."""
    value, _ = CURVES[curve](x)
    return codes_of(value, grid_of(grid, levels), x)


def curve_quantize_backward(
    grad: Tensor, x: Tensor, curve: str, grid: list[Any], levels: list[float]
) -> tuple[Tensor, Tensor]:
    """dx = grad * curve'(x) inside the grid;  dscale = factor * sum(grad * slope)."""
    value, rise = CURVES[curve](x)
    inside, slope = slopes_on(value, grid_of(grid, levels))
    grad_x = in_layout_of(torch.where(inside, grad * rise, 0.0), x)
    return grad_x, learned_gradient((grad * slope).sum(), grid, levels)


def softmax_quantize(
    x: Tensor, multiplier: float, grid: list[Any], levels: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(x * multiplier, -1), its codes, and their qparams; x is contiguous."""
    probabilities = torch.softmax(x * multiplier, -1)
    codes, qparams = codes_of(probabilities, grid_of(grid, levels), x)
    return probabilities, codes, qparams


def softmax_quantize_backward(
    grad: Tensor, probabilities: Tensor, multiplier: float, grid: list[Any], levels: list[float]
) -> tuple[Tensor, Tensor]:
    """The gradients of x and scale, where passed is grad inside the grid and 0 elsewhere, and p the probabilities:

        dx = multiplier * p * (passed - sum(passed * p));  dscale = factor * sum(grad * slope)
    """  # fmt: skip
    p = probabilities
    inside, slope = slopes_on(p, grid_of(grid, levels))
    passed = torch.where(inside, grad, 0.0)
    grad_x = (passed - (passed * p).sum(-1, keepdim=True)) * p * multiplier
    return grad_x, learned_gradient((grad * slope).sum(), grid, levels)
