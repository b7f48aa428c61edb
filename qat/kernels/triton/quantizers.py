"""The fake-quantizer in one launch each way, for float32, bfloat16 and float16 tensors that are dense in any order.

Values are those of the formula, but for the sign of zero: a true division, halves to even, all in float32. The sums of
a scale's gradient are taken block by block in one order, so that a step is reproducible.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.kernels.cpu.addresses import is_dense
from qat.kernels.cpu.quantizers import in_layout_of, rows_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

BLOCK = 1024
"""Elements of a program: eight a thread, which loads and stores 16 bytes at a time."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Nothing is rounded less often than in the formula."""

WHOLE = tl.constexpr(8388608.0)  # 2^23: from here on float32 holds whole numbers only


@triton.jit
def _rint(v):
    """v rounded to the nearest integer, halves to even, as adding 2^23 rounds it; -0.3 becomes -0.0."""
    size = tl.abs(v)
    rounded = tl.where(size < WHOLE, (size + WHOLE) - WHOLE, size)
    return tl.where(v < 0, -rounded, rounded)


@triton.jit
def _grid_at(scale, zero_point, row, low, high, affine: tl.constexpr):
    """Step, and its lowest and highest multiple. A NaN of the zero point makes the step one: every value is then."""
    zero, step = 0.0, tl.load(scale + row)
    if affine:
        given = tl.load(zero_point + row).to(tl.float32)
        zero = _rint(tl.minimum(tl.maximum(given, low), high))
        step = tl.where(given == given, step, given)
    return step, low - zero, high - zero


@triton.jit
def _place(width, blocks, block: tl.constexpr):
    """The row of a program, where its elements begin, their offsets from there, and which of them exist."""
    row, at = tl.program_id(0) // blocks, tl.arange(0, block)
    start = (tl.program_id(0) % blocks).to(tl.int64) * block
    return row, row.to(tl.int64) * width + start, at, at < width - start


@triton.jit
def _quantize(x, y, scale, zero_point, width, blocks, low, high, affine: tl.constexpr, block: tl.constexpr):
    row, base, at, there = _place(width, blocks, block)
    step, lowest, highest = _grid_at(scale, zero_point, row, low, high, affine)
    v = tl.div_rn(tl.load(x + base + at, mask=there, other=0.0).to(tl.float32), step)
    q = _rint(tl.minimum(tl.maximum(v, lowest), highest))
    q = tl.where(v == v, q, v)
    tl.store(y + base + at, (q * step).to(y.dtype.element_ty), mask=there)


@triton.jit
def _gradients(
    grad, x, out, sums, scale, zero_point, width, blocks, low, high,
    affine: tl.constexpr, writes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, base, at, there = _place(width, blocks, block)
    step, lowest, highest = _grid_at(scale, zero_point, row, low, high, affine)
    v = tl.div_rn(tl.load(x + base + at, mask=there, other=0.0).to(tl.float32), step)
    g = tl.load(grad + base + at, mask=there, other=0.0).to(tl.float32)
    bounded = tl.minimum(tl.maximum(v, lowest), highest)
    inside = bounded == v
    if writes:
        tl.store(out + base + at, tl.where(inside, g, 0.0).to(out.dtype.element_ty), mask=there)
    slope = tl.where(inside, _rint(v) - v, tl.where(v == v, bounded, v))
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(there, g * slope, 0.0), 0))
    if affine:
        tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(inside, 0.0, g), 0))


def applies(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> bool:
    """Whether the kernels take this tensor and this grid."""
    plain = all(type(each) in (Tensor, torch.nn.Parameter) for each in (x, scale))
    if not (plain and x.dtype in DTYPES and scale.dtype is torch.float32 and x.numel() and is_dense(x)):
        return False
    if zero_point is not None and not zero_point.numel() == scale.numel() == 1:
        return False
    beside = all(each is None or each.device == x.device for each in (scale, zero_point))
    return beside and bool(rows_of(x, scale)) and scale.dim() <= x.dim()


def _launch(x: Tensor, scale: Tensor) -> tuple[int, int, int]:
    """Rows with a scale each, their length, and how many blocks cover one."""
    rows = rows_of(x, scale)
    width = x.numel() // rows
    return rows, width, -(-width // BLOCK)


class TritonKernels:
    """What `qat.functional` calls in place of its formula."""

    @staticmethod
    def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
        """x on the grid, in its own memory format."""
        layout = torch.contiguous_format if x.is_contiguous() else torch.preserve_format  # as `CPUKernels`
        y, (rows, width, blocks) = torch.empty_like(x, memory_format=layout), _launch(x, scale)
        _quantize[(rows * blocks,)](
            x, y, scale, zero_point, width, blocks, float(qmin), float(qmax), affine=zero_point is not None,
            block=BLOCK, **OPTIONS,
        )  # fmt: skip
        return y

    @staticmethod
    def gradients(
        grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
        needs: tuple[bool, ...] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """All gradients in one pass over x and grad, without any factor."""
        grad, (rows, width, blocks) = in_layout_of(grad, x), _launch(x, scale)
        out: Any = torch.empty_like(grad) if needs[0] else None
        sums = torch.empty((2, rows, blocks), dtype=torch.float32, device=x.device)
        _gradients[(rows * blocks,)](
            grad, x, out, sums, scale, zero_point, width, blocks, float(qmin), float(qmax),
            affine=zero_point is not None, writes=needs[0], block=BLOCK, **OPTIONS,
        )  # fmt: skip
        grad_scale = sums[0].sum(1).view_as(scale)
        return out, grad_scale, None if zero_point is None else -scale.detach() * sums[1].sum(1).view_as(scale)
