"""Learned bit-widths: a uniform grid with a learned range and width."""

import math
from typing import Any

import torch
from torch import Tensor

from qat.functional.rounding import round_ste
from qat.functional.tensors import MOST_BITS, STEFunction, apply, as_dtype, require_floating, sum_to_shape, widened


class LearnedBitsFunction(STEFunction):
    """Round onto an integer grid whose range and bit-width are learned.

    With n = round(bits), qmax = 2^(n-1) - 1 and qmin = -qmax if signed, else qmax = 2^n - 1 and qmin = 0,
    scale = reach / qmax, v = x / scale:
    Forward:     y = scale * clamp(round(v), qmin, qmax)
    Backward:    dy/dx     = 1                     where qmin * scale <= x <= reach, else 0
                 dy/dreach = (round(v) - v) / qmax there, else clamp(v, qmin, qmax) / qmax; times grad_factor
                 dy/dbits  = (round(v) - v) * dscale/dn there, else 0; times grad_factor
                 dscale/dn = -reach / qmax^2 * ln(2) * (qmax + 1)

    The rounding of bits passes its gradient straight through. The mask is taken on x itself: reach / (reach / qmax)
    may come out above qmax, and reach counts as inside. The forward divides by the step, as ONNX QuantizeLinear does
    with the exported scale.
    """

    @staticmethod
    def forward(x: Tensor, reach: Tensor, bits: Tensor, signed: bool, grad_factor: float) -> Tensor:
        value, end = widened(x, reach)
        qmax = _highest_integer(bits, signed, value.dtype)
        qmin = -qmax if signed else torch.zeros_like(qmax)
        step = end / qmax
        return as_dtype(torch.clamp(torch.round(value / step), qmin, qmax).mul(step), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, reach, bits = ctx.saved_tensors
        signed, grad_factor = ctx.options
        value, learned_end, learned, upstream = widened(x.detach(), reach, bits, grad)
        end = learned_end.detach()  # whatever came from a rounding or a clamp counts as a constant
        whole = _highest_integer(bits, signed, value.dtype)
        inside = (value >= (-end if signed else 0)) & (value <= end)
        grad_x = grad_reach = grad_bits = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(inside, grad, 0)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return grad_x, None, None, None, None
        v = value / (end / whole)
        # zero outside before anything is multiplied by it: there it may be inf - inf
        residual = torch.where(inside, torch.round(v) - v, 0)
        qmax = (whole + 1) * torch.exp2(learned - learned.detach()) - 1  # the whole number, differentiable in bits
        if ctx.needs_input_grad[1]:
            edge = torch.clamp(value / end, -1 if signed else 0, 1)
            slope = residual / qmax + torch.where(inside, 0, edge)
            grad_reach = sum_to_shape(upstream * slope, reach.shape).mul(grad_factor).to(reach.dtype)
        if ctx.needs_input_grad[2]:
            slope = residual * (-math.log(2) * learned_end * (qmax + 1) / qmax**2)
            grad_bits = sum_to_shape(upstream * slope, bits.shape).mul(grad_factor).to(bits.dtype)
        return grad_x, grad_reach, grad_bits, None, None


def _highest_integer(bits: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    # a constant; bits that were driven out of range act as the nearest width that has a grid
    whole = torch.clamp(torch.round(bits.detach().to(dtype)), 2 if signed else 1, MOST_BITS)
    return torch.exp2(whole - 1 if signed else whole) - 1


def learned_bits_quantize(
    x: Tensor, reach: Tensor, bits: Tensor, signed: bool = True, grad_factor: float = 1.0
) -> Tensor:
    """Put x on the integer grid of round(bits) bits that ends at reach.

    y and the gradients are those of `LearnedBitsFunction`.

    Args:
        reach: the largest value of the grid, > 0, in the unit of x; shape () or broadcastable to x (per channel).
        bits: the bit-width as a floating-point tensor, 2 .. 16 if signed, else 1 .. 16; shape as reach. A value
            outside acts as the nearest bound.
        signed: True for a grid around 0; False for one that starts there.

    Source: Uhlich et al., "Mixed Precision DNNs: All you need is a good parametrization", arXiv:1905.11452, its
    parametrization by range and bits. Deviation: the step follows from reach and a whole number of bits, so that the
    grid is an integer one; a value exactly on a bound counts as inside.

    >>> x = torch.tensor([0.4, -9.0], requires_grad=True)
    >>> reach, bits = torch.tensor(3.0, requires_grad=True), torch.tensor(3.2, requires_grad=True)
    >>> y = learned_bits_quantize(x, reach, bits)
    >>> y.tolist()
    [0.0, -3.0]
    >>> y.sum().backward()
    >>> x.grad.tolist(), round(reach.grad.item(), 3), round(bits.grad.item(), 3)
    ([1.0, 0.0], -1.133, 0.37)
    """
    return apply(LearnedBitsFunction, require_floating(x, "learned_bits_quantize"), reach, bits, signed, grad_factor)


def bit_cost(bits: Tensor, count: int) -> Tensor:
    """Return the bits of memory that `count` values take: a term for the loss.

    cost = count * round(bits), with d cost/d bits = count; count is the elements of a weight, or of an activation.

    Source: Uhlich et al., arXiv:1905.11452.

    >>> bits = torch.tensor(3.2, requires_grad=True)
    >>> cost = bit_cost(bits, 1000)
    >>> cost.backward()
    >>> cost.item(), bits.grad.item()
    (3000.0, 1000.0)
    """
    return round_ste(require_floating(bits, "bit_cost")) * count
