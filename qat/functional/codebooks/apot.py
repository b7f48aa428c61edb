"""APoT: levels that are sums of powers of two, and its normalised weights."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from qat.functional.channels import ChannelAxis, axes_within_channel, over
from qat.functional.tensors import STEFunction, apply, as_dtype, check_bits, require_floating, sum_to_shape, widened

MOST_MAGNITUDE_BITS = 8
SMALLEST_DEVIATION = 1e-5  # a channel of equal weights has none to divide by


class APoTFunction(STEFunction):
    """Round to the nearest additive power of two.

    Forward, with v = clip(x / alpha, -1, 1), or clip(x / alpha, 0, 1) if unsigned:
                 y = alpha * the level nearest to v, of two the one of smaller magnitude
    Backward:    dy/dx     = 1  where |x| <= alpha (0 <= x <= alpha if unsigned), else 0
                 dy/dalpha = level - x / alpha  there, which counts as a constant, else v
    """

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, bits: int, signed: bool) -> Tensor:
        value, bound = widened(x, alpha)
        v = torch.clamp(value / bound, -1 if signed else 0, 1)
        return as_dtype(_nearest_level(v, bits - signed).mul(bound), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, alpha = (tensor.detach() for tensor in ctx.saved_tensors)
        bits, signed = ctx.options
        value, bound = widened(x, alpha)
        inside = (value >= (-bound if signed else 0)) & (value <= bound)
        grad_x = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(inside, grad, 0)
        if ctx.needs_input_grad[1]:
            v = torch.clamp(value / bound, -1 if signed else 0, 1)
            slope = torch.where(inside, _nearest_level(v, bits - signed) - v, v)
            grad_alpha = sum_to_shape(grad.to(value.dtype) * slope, alpha.shape).to(alpha.dtype)
        return grad_x, grad_alpha, None, None


def _nearest_level(v: Tensor, magnitude_bits: int) -> Tensor:
    units = _levels_in_units(magnitude_bits, v)
    between = (units[1:] + units[:-1]) / (2 * units[-1:])  # rounded once, as the levels are
    index = torch.bucketize(v.abs().contiguous(), between)  # it warns otherwise; a tie stays below
    nearest = (units / units[-1:])[index]
    return torch.where(v < 0, -nearest, torch.where(torch.isnan(v), v, nearest))  # bucketize sorts NaN last


def _levels_in_units(magnitude_bits: int, like: Tensor) -> Tensor:
    # `apot_levels` in units of the smallest power of two, made on the device: copying them over would make the host
    # wait. A level has at most one bit of every term: the h full terms own bit j of each of three fields of h bits, and
    # of an odd number of magnitude bits the last one is a field of its own between the second and the third.
    h, odd = divmod(magnitude_bits, 2)
    field = 2**h - 1
    code = torch.arange(2**magnitude_bits, device=like.device)
    low, high, single = code & field, (code >> h) & field, code >> (2 * h)
    first, second, third = low & ~high, high & ~low, low & high
    unit = (first << (2 * h + odd)) | (second << (h + odd)) | (single << h) | third
    return torch.sort(unit).values.to(like.dtype)


@functools.cache
def apot_levels(magnitude_bits: int) -> tuple[float, ...]:
    """Return the 2^magnitude_bits levels of APoT in ascending order, from 0 to 1.

    Sums of one value from every term, divided by the largest sum. With h = magnitude_bits // 2, term i = 0 .. h - 1 is
    {0, 2^-(i+1), 2^-(i+1+h), 2^-(i+1+2h)}; an odd number of bits adds the term {0, 2^-(2h+1)}, and the third values
    start one later, at 2^-(2h+2). magnitude_bits (without sign) is 1 .. 8.

    Source: Li et al., arXiv:1909.13144. Deviation: 1 bit and 5 to 8 bits are not published; they follow the pattern.

    >>> apot_levels(2)
    (0.0, 0.25, 0.5, 1.0)
    >>> apot_levels(3)
    (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
    """
    check_bits(magnitude_bits, "apot_levels", most=MOST_MAGNITUDE_BITS)
    h, odd = divmod(magnitude_bits, 2)
    terms = [(0.0, 2.0 ** -(i + 1), 2.0 ** -(i + 1 + h), 2.0 ** -(i + 1 + 2 * h + odd)) for i in range(h)]
    single = [(0.0, 2.0 ** -(2 * h + 1))] * odd
    sums = sorted(sum(values) for values in itertools.product(*terms, *single))
    return tuple(value / sums[-1] for value in sums)


def apot_quantize(x: Tensor, alpha: Tensor, bits: int, signed: bool = True) -> Tensor:
    """Put x on the levels of APoT, with gradients for x and alpha.

    y and the gradients are those of `APoTFunction`, the levels those of `apot_levels(bits - 1)`, or `apot_levels(bits)`
    if unsigned. They are no integer grid: the rule does not export to int8.

    Args:
        x: weights go through `normalize_weight` first.
        alpha: the largest level, > 0, in the unit of x; shape () or broadcastable to x (per channel).
        bits: 2 .. 9 if signed, else 1 .. 8.

    Source: Li et al., "Additive Powers-of-Two Quantization", arXiv:1909.13144.

    >>> x = torch.tensor([0.3, -0.6, -5.0], requires_grad=True)
    >>> alpha = torch.tensor(2.0, requires_grad=True)
    >>> y = apot_quantize(x, alpha, 3)
    >>> y.tolist()
    [0.5, -0.5, -2.0]
    >>> y.sum().backward()
    >>> x.grad.tolist(), round(alpha.grad.item(), 2)
    ([1.0, 1.0, 0.0], -0.85)
    """
    check_bits(bits, "apot_quantize", 1 + signed, MOST_MAGNITUDE_BITS + signed)
    return apply(APoTFunction, require_floating(x, "apot_quantize"), alpha, bits, signed)


def normalize_weight(weight: Tensor, channel_axis: ChannelAxis = None) -> Tensor:
    """Shift and scale a weight to mean 0 and standard deviation 1.

    y = (weight - mean) / max(std, 1e-5), with dy/dweight = 1 / max(std, 1e-5): the statistics count as constants.

    Source: Li et al., arXiv:1909.13144. Deviations: std divides by the number of elements, so that one element has a
    standard deviation, and is bounded by 1e-5 from below where the paper adds 1e-5.

    >>> normalize_weight(torch.tensor([[1.0, 3.0], [5.0, 5.0]]), channel_axis=0).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    require_floating(weight, "normalize_weight")
    axes = axes_within_channel(weight, channel_axis, "normalize_weight")
    (wide,) = widened(weight)
    constant = wide.detach()
    mean = over(torch.mean, constant, axes)
    deviation = over(torch.mean, (constant - mean).square(), axes).sqrt().clamp(min=SMALLEST_DEVIATION)
    return as_dtype((wide - mean) / deviation, weight.dtype)
