"""Scales that are powers of two: multiplying by them is a shift."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, as_dtype, check_known, require_floating, widened

Rounding = Literal["nearest", "up"]


class PowerOfTwoFunction(STEFunction):
    """y = 2^round(log2(scale)), or 2^ceil(log2(scale)), with dy/dscale = y / scale.

    The rounding in the log domain is passed straight through; y / scale counts as a constant: no second derivatives.
    """

    @staticmethod
    def forward(scale: Tensor, rounding: Rounding) -> Tensor:
        return as_dtype(_power_of_two(scale, rounding), scale.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scale = ctx.saved_tensors[0].detach()
        power = _power_of_two(scale, *ctx.options)
        return (grad * (power / scale.to(power.dtype))).to(scale.dtype), None


def _power_of_two(scale: Tensor, rounding: Rounding) -> Tensor:
    (wide,) = widened(scale)
    exponent = torch.round(torch.log2(wide))
    if rounding == "up":  # not ceil(log2(scale)): a rounded log2 cannot tell 2^20 from the next float32
        exponent = torch.where(torch.exp2(exponent) < wide, exponent + 1, exponent)
    highest = math.frexp(torch.finfo(scale.dtype).max)[1] - 1
    return torch.exp2(torch.clamp(exponent, max=highest))  # exact: exp2 of a whole number is


def power_of_two_scale(scale: Tensor, rounding: Rounding = "nearest") -> Tensor:
    """Return the power of two that stands for a scale.

    y and the gradient are those of `PowerOfTwoFunction`; y is at most the dtype's largest power of two.
    `lsq_quantize(x, power_of_two_scale(scale), qmin, qmax)` learns a scale that deploys as a shift.

    Args:
        rounding: "nearest" in the log domain (half to even), or "up" to the smallest power of two that is not below
            scale, so that a range never shrinks (TQT).

    Source: Jain et al., "Trained Quantization Thresholds", arXiv:1903.08066, where it is the threshold that is rounded
    up. Deviation: the scale itself is the parameter, not its logarithm.

    >>> scale = torch.tensor([0.3, 0.25, 5.0], requires_grad=True)
    >>> y = power_of_two_scale(scale)
    >>> y.tolist(), power_of_two_scale(scale, "up").tolist()
    ([0.25, 0.25, 4.0], [0.5, 0.25, 8.0])
    >>> y.sum().backward()
    >>> [round(value, 3) for value in scale.grad.tolist()]
    [0.833, 1.0, 0.8]
    """
    require_floating(scale, "power_of_two_scale")
    check_known("rounding", rounding, get_args(Rounding), "power_of_two_scale")
    return apply(PowerOfTwoFunction, scale, rounding)
