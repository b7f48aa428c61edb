"""Integers of a deployed layer: weight codes, their scale, and an int32 bias.

A BatchNorm after the layer folds into the *scale*, not into the weight: W * gamma / sigma has the same integers with
another scale, so folding changes no rounding and needs no simulation in training.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qat.functional import round_ste

LARGEST_BIAS_CODE = float(2**30)  # half of int32
SMALLEST_BOUND = float(2**24)  # of the bias, where the sum of products could need more than the other half
DEAD_BIAS_CODE = float(2**20)  # plus or minus this is the bias if the weight contributes nothing and the scale is free


@dataclass(frozen=True)
class IntegerWeight:
    """Operands of y = (sum(x_codes * codes) + bias_codes) * accumulator_scale."""

    codes: Tensor  # integers (as floats) of the weight, in the weight's shape
    scale: Tensor  # (channels,), > 0, step of the codes with the BatchNorm folded in
    bias_codes: Tensor  # (channels,), integers (as floats) on the grid of accumulator_scale
    accumulator_scale: Tensor  # (channels,), input scale times scale: the value of one unit of the accumulator


def fold_weight(
    codes: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor, norm: nn.Module | None = None
) -> IntegerWeight:
    """Fold bias and BatchNorm into integers.

    With gain = norm.weight / sqrt(norm.running_var + eps) (1 without a norm), per output channel:
    codes * sign(gain), scale * |gain|, and bias_codes = round(((bias - running_mean) * gain + norm.bias) /
    (input_scale * scale * |gain|)). If that unit is no normal float32 or a channel's codes are all 0, the codes are 0
    and the scale is chosen so that the bias alone is exact. If the bias would leave int32, the scale grows and the
    codes shrink.

    The codes are integers as floats, output channels first; scale is their step, of shape () or one per output channel
    (any number of trailing axes of length 1); input_scale is the step of the input's grid, of shape (). The result is
    differentiable in all arguments, straight through the roundings.
    """
    channels = codes.shape[0]
    column = (channels, *[1] * (codes.dim() - 1))
    step = scale.reshape(-1).expand(channels)
    shift = torch.zeros_like(step) if bias is None else bias.float()
    if norm is not None:
        statistics: Any = norm  # a BatchNorm, or a frozen one whose buffers replace parameters and `affine`
        gain = torch.rsqrt(statistics.running_var.float() + statistics.eps)
        offset = torch.zeros_like(gain)
        if getattr(statistics, "affine", True):
            gain, offset = gain * statistics.weight.float(), statistics.bias.float()
        shift = (shift - statistics.running_mean.float()) * gain + offset
        # A negative gain turns the codes around: the scale has to stay positive.
        codes = codes * torch.sign(gain).reshape(column)
        step = step * gain.abs()
    no_unit = input_scale * step < torch.finfo(torch.float32).tiny  # as where the gain is 0
    dead = no_unit | (codes.reshape(channels, -1) == 0).all(1)  # channels whose output is the bias alone
    free = shift.abs().clamp(min=torch.finfo(torch.float32).tiny * DEAD_BIAS_CODE) / (input_scale * DEAD_BIAS_CODE)
    step = torch.where(dead, free, step)
    codes = torch.where(dead.reshape(column), 0, codes)
    # The scale grows only if the weight hardly contributes; then the codes lose bits, and not the bias.
    products = 255 * codes.detach().abs().reshape(channels, -1).sum(1)  # at most
    bound = (2**31 - products).clamp(SMALLEST_BOUND, LARGEST_BIAS_CODE)
    growth = (shift.abs() / (input_scale * step) / bound).clamp(min=1)
    step = step * growth
    codes = torch.where((growth > 1).reshape(column), round_ste(codes / growth.reshape(column)), codes)
    accumulator_scale = input_scale * step
    return IntegerWeight(codes, step, round_ste(shift / accumulator_scale), accumulator_scale)
