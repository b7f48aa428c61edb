"""Arithmetic between uint8 codes in evaluation, and the grids that they lie on.

Each function computes in float32, in the order of operations in which layers evaluate: the codes are the same in both.
It runs in C or Triton where they are, else in torch's operations.
"""

import math
from types import ModuleType
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from qat.codes.operators.add import add_quantize
from qat.codes.operators.grid import SHIFT, shift_of
from qat.codes.operators.quantize import _dequantize, quantize_codes
from qat.integers.frozen import rounds_half_to_even
from qat.kernels.cpu.addresses import elements_at, empty_at, is_dense, numbers_at
from qat.kernels.cpu.compiler import library
from qat.kernels.cpu.quantizers import NO_CLIP, Levels, compiled, threads_for
from qat.kernels.cpu.quantizers import dequantize as dequantize_in_c
from qat.kernels.cpu.structures import Extent, Grid, Rescaling
from qat.kernels.dispatch import passes_values, plain_here, triton_here
from qat.quantizer import Quantizer

NO_GRID = Grid(1.0, 0.0, 0.0, 0.0)


class CodeGrid:
    """A grid of uint8 codes: value = (code - zero) * step, low <= code <= high."""

    def __init__(self, step: float, zero: float, low: float, high: float) -> None:
        self.step, self.zero, self.low, self.high = self.numbers = step, zero, low, high
        self.levels = Grid(*self.numbers)
        self.qparams, self.shift = (torch.tensor(pair, dtype=torch.float32) for pair in ((step, zero), (1.0, zero)))
        scale, point = self.qparams[:1].clone(), self.qparams[1:].clone()
        self.learned = [scale, scale, point], Levels(low, high, 0.0, 1.0, 0.0)


def code_grid_of(quantizer: Quantizer) -> CodeGrid:
    """Return the grid of a quantizer of activations, as uint8 codes."""
    scale, zero_point = quantizer.grid()
    shift = shift_of(quantizer)
    low, high = (float(bound + shift) for bound in quantizer.bounds())
    return CodeGrid(float(scale), float(zero_point) + shift, low, high)


def has_codes(module: nn.Module | None) -> TypeGuard[Quantizer]:
    """Return True if a quantizer's integers fit a byte and round halves to even."""
    if not isinstance(module, Quantizer) or not (module.has_integers and module.is_calibrated) or module.is_disabled:
        return False
    low, high = (bound + shift_of(module) for bound in module.bounds())
    return module.spec.granularity == "tensor" and low >= 0 and high < 256 and rounds_half_to_even(module)


def all_values(source: CodeGrid) -> Tensor:
    """Return the 256 values of a grid, including those outside its bounds."""
    return dequantize(torch.arange(256, dtype=torch.uint8), source)


def _in_c(x: Tensor) -> bool:
    return x.is_cpu and x.numel() > 0 and not plain_here() and library() is not None


def _in_triton(x: Tensor) -> ModuleType | None:
    return triton_here(x, evaluates=True) if passes_values(x) and x.numel() else None


def _origin(kind: torch.dtype) -> float:
    return SHIFT if kind is torch.int8 else 0.0


def _reading(codes: Tensor, grid: CodeGrid) -> tuple[float, float]:
    return grid.step, grid.zero - _origin(codes.dtype)


def _dense(x: Tensor) -> Tensor:
    return x if is_dense(x) else x.contiguous()


def quantize(x: Tensor, grid: CodeGrid, seen: Tensor | None = None) -> tuple[Tensor, bool]:
    """Return clamp(round(x / step) + zero, low, high), and True if a value was NaN.

    The codes have the strides of x if it is dense. On a GPU `seen` becomes NaN instead, so that the host need not wait.
    """
    if (triton := _in_triton(x)) is not None:
        return triton.quantize(_dense(x), grid, x.new_empty((), dtype=torch.float32) if seen is None else seen), False
    if _in_c(x) and x.dtype is torch.float32:
        codes, qparams = quantize_codes(_dense(x), *grid.learned)
        return codes, math.isnan(qparams[0].item())
    v = torch.round(x.float() / grid.step) + grid.zero
    return _bytes(v, grid), bool(v.isnan().any())


def centered(codes: Tensor) -> Tensor:
    """Return codes - 128 in int8."""
    if (triton := _in_triton(codes)) is not None:
        return cast("Tensor", triton.dequantize(_dense(codes), 1.0, float(SHIFT), torch.int8))
    return (codes.int() - SHIFT).to(torch.int8)


def dequantize(codes: Tensor, grid: CodeGrid, step: bool = True) -> Tensor:
    """Return (codes - zero) * step in float32, or without `step` the integers."""
    qparams = grid.qparams if step else grid.shift
    if (triton := _in_triton(codes)) is not None:
        width, zero = _reading(codes, grid)
        return cast("Tensor", triton.dequantize(_dense(codes), width if step else 1.0, zero))
    if _in_c(codes):
        return dequantize_in_c(_dense(codes), qparams)
    return _dequantize(codes, qparams)


def requantize(
    sums: Tensor, bias: Tensor, scale: Tensor, axis: int, clip: tuple[float, float] = NO_CLIP,
    to: CodeGrid | None = None, table: Tensor | None = None, kind: torch.dtype = torch.uint8,
    shift: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the codes on the grid `to` of clamp((sums + bias) * scale, *clip).

    Without a grid, return these floats.

    Args:
        sums: float32 or float64 integers, or int32.
        bias, scale: float32, one for each channel, which lie on `axis` of sums.
        axis: 1, or the last.
        clip: floor and ceiling.
        to: the grid of the result.
        table: 256 bytes or floats, of which those at the codes are the result instead.
        kind: float32 means that code - zero is the result instead, int8 that code - 128 is.
        shift: of int32 sums, an integer for each channel that they lack.
    """
    if (triton := _in_triton(sums)) is not None:
        sums, inner = _with_channels(sums, axis)
        origin = to.zero if to is not None and kind is torch.float32 else _origin(kind)
        kind = table.dtype if table is not None else torch.float32 if to is None else kind
        return cast("Tensor", triton.requantize(sums, shift, bias, scale, inner, clip, to, table, kind, origin))
    if _in_c(sums) and sums.dtype is torch.float32 and (rows := _channels_innermost(sums, axis)) is not None:
        kind = table.dtype if table is not None else torch.float32 if to is None else kind
        given, channels, count = elements_at("sums", rows, rows), bias.numel(), rows.numel()
        result, at = empty_at(rows, kind)
        compiled().requantize(
            given, at if kind is torch.uint8 else None, None if kind is torch.uint8 else at,
            None if table is None else numbers_at("table", table, 256, kind), Extent(count // channels, channels, 1),
            Rescaling(numbers_at("bias", bias, channels), numbers_at("scale", scale, channels), *clip),
            NO_GRID if to is None else to.levels, threads_for(count),
        )  # fmt: skip
        return result
    shape = [-1, *[1] * (sums.dim() - 1 - axis % sums.dim())]
    y = ((sums.float() + bias.view(shape)) * scale.view(shape)).clamp(*clip)
    if to is None:
        return y
    codes = _bytes(torch.round(y / to.step) + to.zero, to)
    if table is not None:
        return table[codes.int()]
    return codes.float() - to.zero if kind is torch.float32 else codes


def add(
    a: Tensor, b: Tensor, grids: tuple[CodeGrid, CodeGrid], to: CodeGrid, clip: tuple[float, float] = NO_CLIP,
    kind: torch.dtype = torch.uint8,
) -> Tensor:  # fmt: skip
    """Return codes on the grid `to` of clamp(a + b, *clip); `kind` is a GPU's dtype."""
    alike = a.shape == b.shape and is_dense(a) and a.stride() == b.stride()
    if alike and (triton := _in_triton(a)) is not None:
        read = map(_reading, (a, b), grids)
        return cast("Tensor", triton.join(a, b, *read, to, clip, kind, _origin(kind), True, None))
    if alike and _in_c(a):
        codes: Tensor = add_quantize(a, b, grids[0].qparams, grids[1].qparams, clip, *to.learned)[0]
        return codes
    y = (dequantize(a, grids[0]) + dequantize(b, grids[1])).clamp(*clip)
    return quantize(y, to)[0]


def multiply(
    a: Tensor, b: Tensor, grids: tuple[CodeGrid, CodeGrid], to: CodeGrid, clip: tuple[float, float] = NO_CLIP,
    kind: torch.dtype = torch.uint8,
) -> Tensor:  # fmt: skip
    """Return codes on the grid `to` of clamp(a * b, *clip); a and b may broadcast."""
    if a.numel() < b.numel():
        a, b, grids = b, a, grids[::-1]  # gates, one for each channel, come second
    gated = a.dim() == 4 and b.shape == (*a.shape[:2], 1, 1)
    alike = gated or (a.shape == b.shape and is_dense(a) and a.stride() == b.stride())
    if alike and (triton := _in_triton(a)) is not None:
        a, inner = _with_channels(a, 1) if gated else (a, None)
        b, read = b.contiguous() if gated else b, map(_reading, (a, b), grids)
        return cast("Tensor", triton.join(a, b, *read, to, clip, kind, _origin(kind), False, inner))
    gates, (source, _) = dequantize(b, grids[1]), grids
    rows = _channels_innermost(a, 1) if gated and clip == NO_CLIP else None
    if not _in_c(a) or rows is None:
        return quantize((dequantize(a, source) * gates).clamp(*clip), to)[0]
    given, (images, channels, *sizes) = elements_at("codes", rows, rows, torch.uint8), a.shape
    (codes, at), gates = empty_at(rows, torch.uint8), gates.contiguous()
    compiled().gate(
        given, numbers_at("gates", gates, images * channels), at, images, Extent(math.prod(sizes), channels, 1),
        source.levels, to.levels, threads_for(a.numel()),
    )  # fmt: skip
    return codes


def look_up(codes: Tensor, table: Tensor) -> Tensor:
    """Return table[codes], for a table of 256 bytes."""
    if (triton := _in_triton(codes)) is not None:
        return cast("Tensor", triton.look_up(_dense(codes), table))
    if _in_c(codes):
        codes = _dense(codes)
        given, count = elements_at("codes", codes, codes, torch.uint8), codes.numel()
        out, at = empty_at(codes, torch.uint8)
        compiled().look_up(given, at, count, numbers_at("table", table, 256, torch.uint8), threads_for(count))
        return out
    return table[codes.int()]


def _bytes(v: Tensor, grid: CodeGrid) -> Tensor:
    return v.clamp(grid.low, grid.high).to(torch.uint8)


def _channels_innermost(x: Tensor, axis: int) -> Tensor | None:
    # With the channels of this axis next to each other in memory; None if x has to be copied for that.
    if axis % x.dim() == x.dim() - 1:
        return x if x.is_contiguous() else None
    return x if x.dim() == 4 and axis == 1 and x.is_contiguous(memory_format=torch.channels_last) else None


def _with_channels(x: Tensor, axis: int) -> tuple[Tensor, int]:
    # x without gaps, and how far apart two of its channels lie.
    rows = _channels_innermost(x, axis)
    return (x.contiguous(), math.prod(x.shape[axis % x.dim() + 1 :])) if rows is None else (rows, 1)
