"""Evaluation on uint8 codes: all between two products' integers in one launch.

Tensors are dense, in any order. The channel of an element is (its place // inner) % channels: `inner` is 1 where
channels are innermost, else the number of pixels. Everything is rounded as in the formulas of
`qat.codes.evaluation.arithmetic`, in their order, so that the codes are those of the CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.kernels.triton.quantizers import BLOCK, OPTIONS, _rint


@triton.jit
def _elements(count, period, block: tl.constexpr):
    # The places of a program's elements, which of them exist, and how far each is into a period and the next.
    start, at = tl.program_id(0).to(tl.int64) * block, tl.arange(0, block)
    return start + at, at < count - start, (start % period).to(tl.int32) + at, start // period


@triton.jit
def _code(y, step, zero, low, high):
    return tl.minimum(tl.maximum(_rint(tl.div_rn(y, step)) + zero, low), high)


@triton.jit
def _quantize_codes(x, codes, seen, count, step, zero, low, high, block: tl.constexpr):
    # `seen` becomes NaN if a value is: no code stands for it.
    place, there, _, _ = _elements(count, count, block)
    v = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    code = _code(tl.where(v == v, v, 0.0), step, zero, low, high)
    tl.store(codes + place, code.to(tl.uint8), mask=there)
    found = tl.max((v != v).to(tl.int32), 0)
    tl.store(seen, float("nan"), mask=found > 0)


@triton.jit
def _values(codes, out, count, step, zero, block: tl.constexpr):
    place, there, _, _ = _elements(count, count, block)
    code = tl.load(codes + place, mask=there, other=0).to(tl.float32)
    tl.store(out + place, ((code - zero) * step).to(out.dtype.element_ty), mask=there)


@triton.jit
def _requantize(
    sums, shift, bias, scale, table, out, count, channels, inner, floor, ceiling, step, zero, low, high, origin,
    shifts: tl.constexpr, quantizes: tl.constexpr, looks_up: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place, there, offset, _ = _elements(count, channels * inner, block)
    channel = (offset // inner) % channels
    y = tl.load(sums + place, mask=there, other=0)
    if shifts:
        y += tl.load(shift + channel)
    y = y.to(tl.float32)
    y = (y + tl.load(bias + channel)) * tl.load(scale + channel)
    y = tl.minimum(tl.maximum(y, floor), ceiling)
    if quantizes:
        y = _code(y, step, zero, low, high)
        if looks_up:
            y = tl.load(table + y.to(tl.int32))
        else:
            y -= origin
    tl.store(out + place, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _join(
    a, b, out, count, channels, inner, period, floor, ceiling, step_a, zero_a, step_b, zero_b, step, zero, low, high,
    origin, adds: tl.constexpr, gates: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # Of codes a and b; with `gates`, b has a code for each channel of an image, which is `period` codes of a.
    place, there, offset, image = _elements(count, period, block)
    x = (tl.load(a + place, mask=there, other=0).to(tl.float32) - zero_a) * step_a
    other = place
    if gates:
        other = (image + offset // period) * channels + (offset // inner) % channels
    y = (tl.load(b + other, mask=there, other=0).to(tl.float32) - zero_b) * step_b
    y = x + y if adds else x * y
    y = tl.minimum(tl.maximum(y, floor), ceiling)
    tl.store(out + place, (_code(y, step, zero, low, high) - origin).to(out.dtype.element_ty), mask=there)


@triton.jit
def _look_up(codes, table, out, count, block: tl.constexpr):
    place, there, _, _ = _elements(count, count, block)
    code = tl.load(codes + place, mask=there, other=0).to(tl.int32)
    tl.store(out + place, tl.load(table + code), mask=there)


def _run(kernel: Any, count: int, *given: object, **constants: bool) -> None:
    kernel[(-(-count // BLOCK),)](*given, **constants, block=BLOCK, **OPTIONS)


def quantize(x: Tensor, grid: Any, seen: Tensor) -> Tensor:
    """Return codes of a dense tensor on a `CodeGrid`; `seen` becomes NaN if one is."""
    codes = torch.empty_like(x, dtype=torch.uint8)
    _run(_quantize_codes, x.numel(), x, codes, seen, x.numel(), *grid.numbers)
    return codes


def dequantize(codes: Tensor, step: float, zero: float, kind: torch.dtype = torch.float32) -> Tensor:
    """Return (codes - zero) * step of dense codes."""
    out = torch.empty_like(codes, dtype=kind)
    _run(_values, codes.numel(), codes, out, codes.numel(), step, zero)
    return out


def requantize(
    sums: Tensor, shift: Tensor | None, bias: Tensor, scale: Tensor, inner: int, clip: tuple[float, float], to: Any,
    table: Tensor | None, kind: torch.dtype, origin: float,
) -> Tensor:  # fmt: skip
    """Return `arithmetic.requantize` of dense sums; codes are reduced by `origin`."""
    out, numbers = torch.empty_like(sums, dtype=kind), (1.0, 0.0, 0.0, 0.0) if to is None else to.numbers
    _run(
        _requantize, sums.numel(), sums, shift, bias, scale, table, out, sums.numel(), bias.numel(), inner, *clip,
        *numbers, origin, shifts=shift is not None, quantizes=to is not None, looks_up=table is not None,
    )  # fmt: skip
    return out


def join(
    a: Tensor, b: Tensor, read_a: tuple[float, float], read_b: tuple[float, float], to: Any,
    clip: tuple[float, float], kind: torch.dtype, origin: float, adds: bool, inner: int | None,
) -> Tensor:  # fmt: skip
    """Return codes of a + b or a * b, of dense codes in one order.

    `inner` is given where b has a code for each channel of an image. `read_a`, `read_b`: step and zero; `origin`: what
    codes have less than those in uint8.
    """
    out, count = torch.empty_like(a, dtype=kind), a.numel()
    channels, period = (1, 1) if inner is None else (a.shape[1], count // len(a))
    _run(
        _join, count, a, b, out, count, channels, inner or 1, period, *clip, *read_a, *read_b, *to.numbers,
        origin, adds=adds, gates=inner is not None,
    )  # fmt: skip
    return out


def look_up(codes: Tensor, table: Tensor) -> Tensor:
    """Return table[codes] of dense codes, for a table of 256 bytes."""
    out = torch.empty_like(codes)
    _run(_look_up, codes.numel(), codes, table, out, codes.numel())
    return out
