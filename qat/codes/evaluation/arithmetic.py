"""Evaluation on integers: what stands between uint8 codes, in C where it is built, else in torch's operations.

Each function computes in float32, in the order of operations in which layers evaluate: the codes are the same in both.
"""

import math

import torch
from torch import Tensor

from qat.codes.operators.add import add_quantize
from qat.codes.operators.quantize import _dequantize, quantize_codes
from qat.kernels.cpu.addresses import elements_at, empty_at, is_dense, numbers_at
from qat.kernels.cpu.compiler import library
from qat.kernels.cpu.quantizers import NO_CLIP, Levels, compiled, threads_for
from qat.kernels.cpu.quantizers import dequantize as dequantize_in_c
from qat.kernels.cpu.structures import Extent, Grid, Rescaling
from qat.kernels.dispatch import plain_here

NO_GRID = Grid(1.0, 0.0, 0.0, 0.0)


class CodeGrid:
    """The grid of uint8 codes, value = (code - zero) * step with low <= code <= high, as operators and C take it."""

    def __init__(self, step: float, zero: float, low: float, high: float) -> None:
        self.step, self.zero, self.low, self.high = step, zero, low, high
        self.levels = Grid(step, zero, low, high)
        self.qparams, self.shift = (torch.tensor(pair, dtype=torch.float32) for pair in ((step, zero), (1.0, zero)))
        scale, point = self.qparams[:1].clone(), self.qparams[1:].clone()
        self.learned = [scale, scale, point], Levels(low, high, 0.0, 1.0, 0.0)


def _in_c(x: Tensor) -> bool:
    return x.is_cpu and x.numel() > 0 and not plain_here() and library() is not None


def quantize(x: Tensor, grid: CodeGrid) -> tuple[Tensor, bool]:
    """clamp(round(x / step) + zero, low, high), halves to even, and whether a value was NaN, which no code stands for.

    The codes have the strides of x if it is dense.
    """
    if _in_c(x) and x.dtype is torch.float32:
        codes, qparams = quantize_codes(x if is_dense(x) else x.contiguous(), *grid.learned)
        return codes, math.isnan(qparams[0].item())
    v = torch.round(x.float() / grid.step) + grid.zero
    return _bytes(v, grid), bool(v.isnan().any())


def dequantize(codes: Tensor, grid: CodeGrid, step: bool = True) -> Tensor:
    """(codes - zero) * step in float32; without `step`, the integers codes - zero."""
    qparams = grid.qparams if step else grid.shift
    if _in_c(codes):
        return dequantize_in_c(codes if is_dense(codes) else codes.contiguous(), qparams)
    return _dequantize(codes, qparams)


def requantize(
    sums: Tensor, bias: Tensor, scale: Tensor, axis: int, clip: tuple[float, float] = NO_CLIP,
    to: CodeGrid | None = None, table: Tensor | None = None, centered: bool = False,
) -> Tensor:  # fmt: skip
    """The codes on the grid `to` of clamp((sums + bias) * scale, *clip), or these floats without it.

    Args:
        sums: float32 or float64 integers.
        bias, scale: float32, one for each channel, which lie on `axis` of sums.
        axis: 1, or the last.
        clip: floor and ceiling.
        to: the grid of the result.
        table: 256 bytes or floats, of which those at the codes are the result instead.
        centered: code - zero is the result instead, in float32.
    """
    if _in_c(sums) and sums.dtype is torch.float32 and (rows := _channels_innermost(sums, axis)) is not None:
        kind = table.dtype if table is not None else torch.float32 if to is None or centered else torch.uint8
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
    return codes.float() - to.zero if centered else codes


def add(
    a: Tensor, b: Tensor, grids: tuple[CodeGrid, CodeGrid], to: CodeGrid, clip: tuple[float, float] = NO_CLIP
) -> Tensor:
    """The codes on the grid `to` of clamp(a + b, *clip), where a and b are codes on `grids`."""
    if _in_c(a) and a.shape == b.shape and is_dense(a) and a.stride() == b.stride():
        codes: Tensor = add_quantize(a, b, grids[0].qparams, grids[1].qparams, clip, *to.learned)[0]
        return codes
    y = (dequantize(a, grids[0]) + dequantize(b, grids[1])).clamp(*clip)
    return quantize(y, to)[0]


def multiply(
    a: Tensor, b: Tensor, grids: tuple[CodeGrid, CodeGrid], to: CodeGrid, clip: tuple[float, float] = NO_CLIP
) -> Tensor:
    """The codes on the grid `to` of clamp(a * b, *clip), for codes on `grids`, which may broadcast."""
    if a.numel() < b.numel():
        a, b, grids = b, a, grids[::-1]
    gates, (source, _) = dequantize(b, grids[1]), grids
    rows = _channels_innermost(a, 1) if a.dim() == 4 and b.shape == (*a.shape[:2], 1, 1) and clip == NO_CLIP else None
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
    """table[codes], for a table of 256 bytes."""
    if _in_c(codes):
        codes = codes if is_dense(codes) else codes.contiguous()
        given, count = elements_at("codes", codes, codes, torch.uint8), codes.numel()
        out, at = empty_at(codes, torch.uint8)
        compiled().look_up(given, at, count, numbers_at("table", table, 256, torch.uint8), threads_for(count))
        return out
    return table[codes.int()]


def _bytes(v: Tensor, grid: CodeGrid) -> Tensor:
    return v.clamp(grid.low, grid.high).to(torch.uint8)


def _channels_innermost(x: Tensor, axis: int) -> Tensor | None:
    """x with the channels of this axis next to each other in memory; None if it has to be copied for that."""
    if axis % x.dim() == x.dim() - 1:
        return x if x.is_contiguous() else None
    return x if x.dim() == 4 and axis == 1 and x.is_contiguous(memory_format=torch.channels_last) else None
