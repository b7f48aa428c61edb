"""PACT: an unsigned grid from zero to a learned upper bound."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, as_dtype, check_bits, require_floating, sum_to_shape, widened


class PACTFunction(STEFunction):
    """Clip to 0 .. alpha and round onto 2^bits - 1 equal steps.

    Forward, with n = 2^bits - 1 and step = alpha / n:    y = step * clamp(round(x / step), 0, n)
    Backward:    dy/dx     = 1  where 0 <= x <= alpha, else 0
                 dy/dalpha = 1  where x >= alpha, else 0

    The masks are taken on x itself, so that a value exactly on alpha counts as inside whatever x / step rounds to. The
    forward divides by the step, as ONNX QuantizeLinear does with the exported scale: the same integers, ties included.
    """

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, bits: int) -> Tensor:
        value, bound = widened(x, alpha)
        steps = 2**bits - 1
        step = bound / steps
        return as_dtype(torch.clamp(torch.round(value / step), 0, steps).mul(step), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, alpha = ctx.saved_tensors
        value, bound = widened(x, alpha)
        grad_x = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where((value >= 0) & (value <= bound), grad, 0)
        if ctx.needs_input_grad[1]:
            clipped = torch.where(value >= bound, grad.to(value.dtype), 0)
            grad_alpha = sum_to_shape(clipped, alpha.shape).to(alpha.dtype)
        return grad_x, grad_alpha, None


def pact_quantize(x: Tensor, alpha: Tensor, bits: int) -> Tensor:
    """Put x on the unsigned grid of 2^bits levels from 0 to alpha.

    y and the gradients are those of `PACTFunction`. The levels are alpha / n * {0 .. n} with n = 2^bits - 1: an integer
    grid of scale alpha / n with zero point 0. alpha is > 0, in the unit of x, of shape () or broadcastable to x.

    Source: Choi et al., "PACT", arXiv:1805.06085. Deviation: x = alpha counts as inside for x too (the paper leaves it
    to alpha alone).

    >>> x = torch.tensor([-3.0, 2.2, 6.0, 9.0], requires_grad=True)
    >>> alpha = torch.tensor(6.0, requires_grad=True)
    >>> y = pact_quantize(x, alpha, 2)
    >>> y.tolist()
    [0.0, 2.0, 6.0, 6.0]
    >>> y.sum().backward()
    >>> x.grad.tolist(), alpha.grad.item()
    ([0.0, 1.0, 1.0, 0.0], 2.0)
    """
    check_bits(bits, "pact_quantize")
    return apply(PACTFunction, require_floating(x, "pact_quantize"), alpha, bits)
