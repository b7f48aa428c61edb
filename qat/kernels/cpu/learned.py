"""A quantizer's learned numbers as the kernels take them: by address, so that Python never reads their values."""

from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import compiled, threads_for
from qat.kernels.cpu.structures import LearnedGrid


class Levels(NamedTuple):
    """The numbers of a quantizer that are not tensors.

    Attributes:
        low, high: lowest and highest code.
        shift: added to codes and zero point, so that they fit uint8.
        factor: multiplies the scale's gradient.
        relative: whether the square of the step multiplies it too.
    """

    low: int
    high: int
    shift: int
    factor: float
    relative: bool


def learned_grid(
    scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int, shift: int, factor: float,
    relative: bool,
) -> LearnedGrid:  # fmt: skip
    """The C kernels' view of a quantizer: its tensors, one float32 number each, and the fields of its `Levels`."""
    zero = None if zero_point is None else numbers_at("zero_point", zero_point, 1)
    return LearnedGrid(
        numbers_at("scale", scale, 1), numbers_at("smallest", smallest, 1), zero, low, high, shift, factor, relative
    )


def step_and_zero(qparams: Tensor) -> tuple[float, float]:
    """The step and zero that a kernel wrote next to its codes; the step is NaN if one of the values was."""
    step, zero = qparams.tolist()
    return step, zero


def dequantize(codes: Tensor, qparams: Tensor) -> Tensor:
    """(codes - zero) * step in float32, in the memory format of codes."""
    y = torch.empty_like(codes, dtype=torch.float32)
    compiled().dequantize(
        elements_at("codes", codes, codes, torch.uint8), elements_at("values", y, codes), y.numel(),
        numbers_at("step and zero", qparams, 2), threads_for(y.numel()),
    )  # fmt: skip
    return y
