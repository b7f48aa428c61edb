"""Low-precision floats by a scale, and OCP Microscaling (MX) by a scale a block."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, as_dtype, check_known, require_floating, sum_to_shape, widened


class FloatFormat(NamedTuple):
    """A binary floating-point format: sign, exponent, mantissa."""

    exponent_bits: int
    mantissa_bits: int  # without the leading one
    bias: int  # what is subtracted from the stored exponent
    largest: float  # the largest finite number

    @property
    def lowest_exponent(self) -> int:
        """Exponent of the smallest normal number, whose distance subnormal ones share."""
        return 1 - self.bias

    @property
    def highest_exponent(self) -> int:
        """Exponent of the largest number."""
        return math.frexp(self.largest)[1] - 1


FLOAT_FORMATS = {
    "e4m3": FloatFormat(4, 3, 7, 448.0),
    "e5m2": FloatFormat(5, 2, 15, 57344.0),
    "e3m2": FloatFormat(3, 2, 3, 28.0),
    "e2m3": FloatFormat(2, 3, 1, 7.5),
    "e2m1": FloatFormat(2, 1, 1, 6.0),
}
"""The 8, 6 and 4 bit formats of OCP; e4m3 is the variant without infinities, torch.float8_e4m3fn."""

# What an element of a Microscaling block can be; an integer times 1/64 is a float with a single binade.
ELEMENT_FORMATS = {**FLOAT_FORMATS, "int8": FloatFormat(1, 6, 1, 127 / 64)}
SCALE_EXPONENTS = (-127, 127)  # of E8M0, in which the scale of a Microscaling block is stored
SHIFTS = 30  # 1 can be shifted so far in 32 bits


class FloatFunction(STEFunction):
    """Round onto the numbers of a low-precision float, times a scale.

    Forward, with v = x / scale:    y = scale * cast(v), cast rounds half to even and saturates at +-largest
    Backward:    dy/dx     = 1            where |v| <= largest, else 0
                 dy/dscale = cast(v) - v  there, else clamp(v, -largest, largest)
    """

    @staticmethod
    def forward(x: Tensor, scale: Tensor, format: str) -> Tensor:
        # the format by its name: a tuple would be taken apart by `torch.func`
        value, step = widened(x, scale)
        return as_dtype(cast(value / step, format).mul(step), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, scale = (saved.detach() for saved in ctx.saved_tensors)
        (format,) = ctx.options
        value, step = widened(x, scale)
        v = value / step
        largest = ELEMENT_FORMATS[format].largest
        bounded = torch.clamp(v, -largest, largest)
        inside = bounded == v
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(inside, grad, 0)
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, cast(v, format) - v, bounded)
            grad_scale = sum_to_shape(grad.to(v.dtype) * slope, scale.shape).to(scale.dtype)
        return grad_x, grad_scale, None


def cast(v: Tensor, format: str) -> Tensor:
    """Return the nearest numbers of ELEMENT_FORMATS, ties to even, saturated.

    >>> cast(torch.tensor([0.2, 0.25, 2.5, -9.0]), "e2m1").tolist()
    [0.0, 0.0, 2.0, -6.0]
    """
    target = ELEMENT_FORMATS[format]
    bounded = torch.clamp(v, -target.largest, target.largest)
    binade = leading_power(bounded.abs(), target.lowest_exponent, target.highest_exponent)
    quantum = binade * 2.0**-target.mantissa_bits
    return torch.round(bounded / quantum).mul(quantum)


def leading_power(magnitude: Tensor, lowest: int, highest: int) -> Tensor:
    """Return the largest of 2^lowest .. 2^highest that is at most magnitude."""
    # Integers are shifted: log2, exp2 and pow are an ulp off on some devices, which is a whole binade here.
    bounded = magnitude.clamp(2.0**lowest, 2.0**highest)  # 2^lowest stands for what is smaller
    above = torch.frexp(bounded)[1] - (1 + lowest)
    factors = max(math.ceil((highest - lowest) / SHIFTS), 1)
    # All factors but the last lie in 2^-15 .. 2^15, so that no product leaves the range of float32 on the way.
    shares = [-SHIFTS // 2] * (factors - 1) + [lowest + SHIFTS // 2 * (factors - 1)]
    power = torch.ones_like(bounded)
    for index, exponent in enumerate(shares):
        bits = (above - index * SHIFTS).clamp(0, SHIFTS)
        power = power * (torch.bitwise_left_shift(torch.ones_like(bits), bits).to(bounded.dtype) * 2.0**exponent)
    return power


def float_quantize(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """Put x on the numbers of a low-precision float, times a scale.

    y and the gradients are those of `FloatFunction`, subnormal numbers included; format is a name of FLOAT_FORMATS:
    "e4m3", "e5m2", "e3m2", "e2m3" or "e2m1".

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; OCP Microscaling, arXiv:2310.10537.
    Deviation: e5m2 saturates too instead of giving infinity, as training wants it. The scale's gradient is LSQ's.

    >>> x = torch.tensor([0.3, 1.0625, 500.0], requires_grad=True)
    >>> y = float_quantize(x, torch.tensor(1.0), "e4m3")
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.3125, 1.0, 448.0], [1.0, 1.0, 0.0])
    """
    require_floating(x, "float_quantize")
    check_known("format", format, FLOAT_FORMATS, "float_quantize")
    return apply(FloatFunction, x, scale, format)


def mx_quantize(x: Tensor, format: str, block_size: int = 32, axis: int = -1) -> Tensor:
    """Put every block of x on a low-precision grid with a power-of-two scale.

    y = scale * cast(x / scale), scale = 2^(floor(log2 max|x|) - e), with e the exponent of the format's largest
    number; cast rounds half to even and saturates. The scale is a constant:
    dy/dx = 1 where |x / scale| <= largest, else 0 (0 so for the end of the block's last binade).

    Args:
        format: "e4m3", "e5m2" (8 bits), "e3m2", "e2m3" (6 bits), "e2m1" (4 bits) or "int8" (MXINT8, steps of 1/64).
        block_size: elements that share a scale; the standard's is 32. An axis that is shorter is one block.
        axis: along which the blocks lie: the one that a matrix product sums over.

    A block of zeros gives zeros, a block with a NaN NaNs; an infinite element counts as its dtype's largest number. A
    block_size that does not divide the length of the axis is a ValueError.

    Source: Rouhani et al., "Microscaling Data Formats for Deep Learning", arXiv:2310.10537; OCP MX v1.0.

    >>> x = torch.tensor([[0.3, -7.9, 1.0, 0.0], [0.0, 0.0, 0.0, 0.01]])
    >>> mx_quantize(x, "e2m1", block_size=4).tolist()
    [[0.5, -6.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.01171875]]
    """
    require_floating(x, "mx_quantize")
    check_known("format", format, ELEMENT_FORMATS, "mx_quantize")
    rows = x if x.ndim else x.unsqueeze(0)
    if not -rows.ndim <= axis < rows.ndim:
        raise ValueError(
            f"mx_quantize: axis must be in {-rows.ndim}..{rows.ndim - 1} for x of shape {tuple(x.shape)}, got {axis}"
        )
    rows = rows.movedim(axis, -1)
    length = rows.shape[-1]
    size = min(block_size, max(length, 1))
    if size < 1:
        raise ValueError(f"mx_quantize: block_size must be at least 1, got {size}")
    if length % size:
        divisors = ", ".join(str(size) for size in range(1, length + 1) if length % size == 0)
        raise ValueError(
            f"mx_quantize: block_size must divide the length of axis {axis}, which is {length}, got {size}; "
            f"its divisors: {divisors}"
        )
    blocks = rows.reshape(*rows.shape[:-1], length // size, size)
    y = apply(FloatFunction, blocks, mx_scale(blocks.detach(), format), format).flatten(-2).movedim(-1, axis)
    return y if x.ndim else y.squeeze(0)


def mx_scale(blocks: Tensor, format: str) -> Tensor:
    """Return the shared power of two of every block, the last axis being a block.

    It is 2^-127 .. 2^127, 1 for zeros, or NaN; (..., 1) for blocks (..., block), in float32, or float64 as the blocks.
    """
    wide = torch.promote_types(blocks.dtype, torch.float32)
    limit = torch.finfo(blocks.dtype).max  # of its own dtype, so that an infinite element stays finite in it
    peak = blocks.abs().amax(-1, keepdim=True).clamp(max=limit).to(wide)
    shift = ELEMENT_FORMATS[format].highest_exponent
    lowest, highest = (exponent + shift for exponent in SCALE_EXPONENTS)
    highest = min(highest, math.frexp(torch.finfo(wide).max)[1] - 1)  # a power that this dtype has
    scale = leading_power(peak, lowest, highest) * 2.0**-shift
    # 1 for zeros: 2^-127 is subnormal, and the processor may be told to read such a number as 0
    return torch.where(peak == 0, 1, torch.where(peak.isnan(), peak, scale))
