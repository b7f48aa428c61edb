"""Fixed point: integers brought from grid to grid by an int32 multiplier and a shift, as microcontrollers do it.

The scheme is that of arXiv:1712.05877 and of TensorFlow Lite's quantization specification, with gemmlowp's roundings,
which round twice, as TensorFlow Lite Micro's reference kernels do. Kernels built with TFLITE_SINGLE_ROUNDING differ.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat.functional.tensors import require_floating
from qat.integers.grids import holds_bound
from qat.integers.modules import Quantize
from qat.integers.products import Product
from qat.kernels.cpu.quantizers import NO_CLIP
from qat.kernels.geometry import Geometry
from qat.kernels.integers import Numbers
from qat.layers import IntegerWeight, QuantLayer

HIGHEST, LARGEST_BIAS = 127, 2**30
LEFT_SHIFT = 20
"""Bits that the operands of a sum are shifted by, before they are brought to one scale."""


def quantized_multiplier(real: float) -> tuple[int, int]:
    """The multiplier of 31 bits and the shift with real = multiplier * 2**(shift - 31), nearly.

    >>> quantized_multiplier(0.75), quantized_multiplier(1.0)
    ((1610612736, 0), (1073741824, 1))
    """
    fraction, shift = math.frexp(real)
    multiplier = math.floor(fraction * 2**31 + 0.5)
    if multiplier == 2**31:
        multiplier, shift = 2**30, shift + 1
    return (multiplier, shift) if shift >= -31 else (0, 0)


def rescaled(x: Tensor, multiplier: Tensor, shift: Tensor) -> Tensor:
    """round(round(x * 2**max(shift, 0) * multiplier / 2**31) / 2**max(-shift, 0)): `MultiplyByQuantizedMultiplier`.

    The first rounding takes halves up (`SaturatingRoundingDoublingHighMul`), the second one away from zero
    (`RoundingDivideByPOT`).

    Args:
        x: int64, of values that fit int32 when they are shifted.
        multiplier, shift: of `quantized_multiplier`, int64, in shapes that go with x.
    """
    high = ((x << shift.clamp(min=0)) * multiplier + 2**30) >> 31
    right = (-shift).clamp(min=0)
    mask = (1 << right) - 1
    return (high >> right) + ((high & mask) > (mask >> 1) + (high < 0)).long()


def headroom(weight: Tensor, bias: Tensor) -> int:
    """The largest power of two by which int8 weights, and a bias within 2**30, can be multiplied.

    A sum that is rounded twice, the first time to its unit, then loses nothing the first time.
    """
    factor, weight_size, bias_size = 1, max(int(weight.int().abs().max()), 1), int(bias.long().abs().max())
    while 2 * factor * weight_size <= HIGHEST and 2 * factor * bias_size <= LARGEST_BIAS:
        factor *= 2
    return factor


class Rescaling(nn.Module):
    """Multiplies integers by real numbers, one or one a channel, in fixed point."""

    def __init__(self, reals: Sequence[float]) -> None:
        super().__init__()
        pairs = torch.tensor([quantized_multiplier(real) for real in reals])
        self.multiplier, self.shift = nn.Buffer(pairs[:, 0].clone()), nn.Buffer(pairs[:, 1].clone())

    def of(self, x: Tensor, trailing: int = 0) -> Tensor:
        """`rescaled`; the channels of x have this many axes behind them."""
        shape = [-1, *[1] * trailing]
        return rescaled(x, self.multiplier.view(shape), self.shift.view(shape))


class Onto:
    """uint8 codes of integers in units of a grid's step, bounded by the codes of a clip's floor and ceiling."""

    def __init__(self, to: Numbers, clip: tuple[float, float] = NO_CLIP) -> None:
        step, zero, low, high = to.grid
        levels = (torch.tensor(clip) / step).round().clamp(low - zero, high - zero)
        self.zero, self.low, self.high = int(zero), *(int(level + zero) for level in levels)

    def __call__(self, levels: Tensor) -> Tensor:
        """clamp(levels + zero, low, high)."""
        return (levels + self.zero).clamp(self.low, self.high).to(torch.uint8)


class FixedQuantize(Quantize):
    """clamp(round(x / step) + zero, low, high), halves away from zero, as in C."""

    def forward(self, x: Tensor) -> Tensor:
        """uint8 codes of floats."""
        step = self.grid.grid.step
        return super().forward(rounded(require_floating(x, self.name).float() / step) * step)


def rounded(x: Tensor) -> Tensor:
    """round(x), halves away from zero."""
    whole = x.trunc()
    return whole + ((x - whole).abs() >= 0.5) * x.sign()


def moving_table(source: Numbers, to: Numbers, clips: Sequence[tuple[float, float]] = ()) -> Tensor:
    """The codes on another grid of all 256 codes, bounded on their own where it holds the bounds, else on the other."""
    zero, codes, (low, high) = int(source.grid.zero), torch.arange(256), NO_CLIP
    for clip in clips:
        if all(holds_bound(bound, *source.grid) for bound in clip):
            codes = Onto(source, clip)(codes - zero).long()
        else:
            low, high = max(low, clip[0]), min(high, clip[1])
    return Onto(to, (low, high))(Rescaling([source.grid.step / to.grid.step]).of(codes - zero))


class FixedProduct(Product):
    """A `Product` whose sums are brought to the grid `to` in fixed point."""

    def __init__(
        self, layer: QuantLayer, geometry: Geometry, integers: IntegerWeight, source: Numbers,
        clip: tuple[float, float], to: Numbers,
    ) -> None:  # fmt: skip
        super().__init__(layer, geometry, integers, source, clip, to)
        bias, scales = integers.bias_codes.detach().long(), integers.scale.detach().float().reshape(-1)
        factor = headroom(self.weight, bias)
        self.factor, self.bias, self.onto = factor, nn.Buffer(bias), Onto(to, clip)
        products = source.grid.step * (scales / factor).double()
        if not geometry.stride and len(bias) == 1:  # for one channel, linear kernels multiply the scales in float
            products = products.float().double()
        self.rescaling = Rescaling((products / to.grid.step).expand(len(bias)).tolist())
        del self.scale

    def forward(self, codes: Tensor) -> Tensor:
        """Codes on the grid `to`."""
        sums, trailing = self.exact_sums(codes).long(), self.weight.dim() - 2
        return self.onto(self.rescaling.of((sums + self.bias.view(-1, *[1] * trailing)) * self.factor, trailing))


class FixedJoin(nn.Module):
    """The codes of clamp(a + b, *clip), or of a - b or a * b.

    A sum brings both operands, shifted left by 20 bits, to twice the larger scale, and the result to its own.
    """

    def __init__(self, kind: str, sources: Sequence[Numbers], to: Numbers, clip: tuple[float, float]) -> None:
        super().__init__()
        self.kind, self.onto = kind, Onto(to, clip)
        self.zeros = [int(source.grid.zero) for source in sources]
        first, second = (source.grid.step for source in sources)
        twice = 2 * max(first, second)
        self.first, self.second = Rescaling([first / twice]), Rescaling([second / twice])
        real = first * second if kind == "mul" else twice / (1 << LEFT_SHIFT)
        self.result = Rescaling([real / to.grid.step])

    def forward(self, *operands: Tensor) -> Tensor:
        """uint8 codes of uint8 codes."""
        a, b = (codes.long() - zero for codes, zero in zip(operands, self.zeros, strict=True))
        if self.kind == "mul":
            return self.onto(self.result.of(a * b))
        a, b = self.first.of(a << LEFT_SHIFT), self.second.of(b << LEFT_SHIFT)
        return self.onto(self.result.of(a + b if self.kind == "add" else a - b))


class FixedAverage(nn.Module):
    """Average pooling: on one grid the mean of int8, halves away from zero; else a rescaled sum of 64 times the codes.

    `pool` is an nn.AvgPool2d, or an nn.AdaptiveAvgPool2d, whose windows have to be equal.
    """

    def __init__(self, pool: Any, source: Numbers, to: Numbers, clip: tuple[float, float]) -> None:
        super().__init__()
        self.pool, self.onto, self.zero = pool, Onto(to, clip), int(source.grid.zero)
        self.scales = (source.grid.step, to.grid.step)
        self.shift = HIGHEST - int(to.grid.high)  # from these codes to int8
        self.is_mean = source.grid.step == to.grid.step and self.zero - source.grid.high == to.grid.zero - to.grid.high

    def forward(self, codes: Tensor) -> Tensor:
        """uint8 codes of uint8 codes, (N, C, H, W)."""
        x = codes.double() - self.zero
        means, kernel = self.pool(x), getattr(self.pool, "kernel_size", None)
        if kernel is None:  # it adapts
            sizes, wanted = tuple(x.shape[-2:]), tuple(means.shape[-2:])
            if any(size % want for size, want in zip(sizes, wanted, strict=True)):
                raise ValueError(f"fixed point averages equal windows only, got {sizes} pixels for {wanted}")
            kernel = [size // want for size, want in zip(sizes, wanted, strict=True)]
        count = kernel**2 if isinstance(kernel, int) else math.prod(kernel)
        sums = (means * count).round().long()
        if not self.is_mean:
            unit = float(torch.tensor(1 / (64 * count)))
            return self.onto(Rescaling([self.scales[0] * unit / self.scales[1]]).to(codes.device).of(64 * sums))
        zero = self.onto.zero + self.shift
        sums = sums + count * zero
        return self.onto((sums.abs() + count // 2) // count * sums.sign() - zero)
