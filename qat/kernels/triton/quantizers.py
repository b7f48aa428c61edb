"""The fake-quantizer, and clip and quantizer of a tensor or a sum.

Each is one launch each way. Tensors are float32, bfloat16 or float16, dense in any order.

Values are those of the formula, but for the sign of zero: a true division, halves to even, all in float32. The sums of
a scale's gradient are taken block by block in one order, so that a step is reproducible.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.kernels.cpu.addresses import is_dense
from qat.kernels.cpu.quantizers import in_layout_of, rows_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

BLOCK = 1024
"""Elements of a program: eight a thread, which loads and stores 16 bytes at once."""

MOST_TURNS = 16
"""Blocks of a row that one program sums up, so that no other launch is needed."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Options with which nothing is rounded less often than in the formula."""

WHOLE = tl.constexpr(8388608.0)  # 2^23: from here on float32 holds whole numbers only


@triton.jit
def _rint(v):
    # v rounded to the nearest integer, halves to even, as adding 2^23 rounds it; -0.3 becomes -0.0.
    size = tl.abs(v)
    rounded = tl.where(size < WHOLE, (size + WHOLE) - WHOLE, size)
    return tl.where(v < 0, -rounded, rounded)


@triton.jit
def _grid_at(scale, zero_point, row, low, high, affine: tl.constexpr):
    # Step, and its lowest and highest multiple. A NaN of the zero point makes the step one: every value is then.
    zero, step = 0.0, tl.load(scale + row)
    if affine:
        given = tl.load(zero_point + row).to(tl.float32)
        zero = _rint(tl.minimum(tl.maximum(given, low), high))
        step = tl.where(given == given, step, given)
    return step, low - zero, high - zero


@triton.jit
def _place(width, blocks, block: tl.constexpr):
    # The row of a program, where its elements begin, their offsets from there, and which of them exist.
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
    """Return True if the kernels take this tensor and this grid."""
    plain = all(type(each) in (Tensor, torch.nn.Parameter) for each in (x, scale))
    if not (plain and x.dtype in DTYPES and scale.dtype is torch.float32 and x.numel() and is_dense(x)):
        return False
    if zero_point is not None and not zero_point.numel() == scale.numel() == 1:
        return False
    beside = all(each is None or each.device == x.device for each in (scale, zero_point))
    return beside and bool(rows_of(x, scale)) and scale.dim() <= x.dim()


def _launch(x: Tensor, scale: Tensor) -> tuple[int, int, int]:
    # Rows with a scale each, their length, and how many blocks cover one.
    rows = rows_of(x, scale)
    width = x.numel() // rows
    return rows, width, -(-width // BLOCK)


class TritonKernels:
    """The fake-quantizer in Triton, called in place of the formula."""

    @staticmethod
    def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
        """Return x on the grid, in its own memory format."""
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
        """Return all gradients in one pass over x and grad, without any factor."""
        grad, (rows, width, blocks) = in_layout_of(grad, x), _launch(x, scale)
        out = torch.empty_like(grad) if needs[0] else None
        sums = torch.empty((2, rows, blocks), dtype=torch.float32, device=x.device)
        _gradients[(rows * blocks,)](
            grad, x, out, sums, scale, zero_point, width, blocks, float(qmin), float(qmax),
            affine=zero_point is not None, writes=needs[0], block=BLOCK, **OPTIONS,
        )  # fmt: skip
        grad_scale = sums[0].sum(1).view_as(scale)
        return out, grad_scale, None if zero_point is None else -scale.detach() * sums[1].sum(1).view_as(scale)


CHAIN_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""Options with which y * alpha + offset is rounded once, as in C."""

LARGEST = tl.constexpr(1e18)  # of a step, as `positive_scale` reads it

DOUBLE = tl.float64


@triton.jit
def _grid_in_force(scale, smallest, zero_point, low, high, floor, ceiling, affine: tl.constexpr):
    # The step, its lowest and highest multiple, and floor and ceiling in steps.
    given, least = tl.load(scale), tl.load(smallest)
    step = tl.minimum(tl.where(given >= least, given, least), LARGEST)
    zero = 0.0
    if affine:
        zero = _rint(tl.minimum(tl.maximum(tl.load(zero_point).to(tl.float32), low), high))
    return step, low - zero, high - zero, tl.div_rn(floor, step), tl.div_rn(ceiling, step)


@triton.jit
def _passing(v, lowest, highest, floor, ceiling):
    # True where the gradient passes at v, and the slope of the scale's gradient.
    clipped = tl.minimum(tl.maximum(v, floor), ceiling)
    bounded = tl.minimum(tl.maximum(clipped, lowest), highest)
    inside = bounded == clipped
    slope = tl.where(inside, _rint(clipped) - clipped, bounded)
    return inside & (v > floor) & (v < ceiling), tl.where(v == v, slope, v)


@triton.jit
def _sum_quantize(
    a, b, out, scale, smallest, zero_point, low, high, floor, ceiling, width, blocks,
    joins: tl.constexpr, affine: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # Of rows with a scale each.
    row, start, at, there = _place(width, blocks, block)
    step, lowest, highest, floor, ceiling = _grid_in_force(
        scale + row, smallest + row, zero_point, low, high, floor, ceiling, affine
    )
    v = tl.load(a + start + at, mask=there, other=0.0).to(tl.float32)
    if joins:
        v += tl.load(b + start + at, mask=there, other=0.0).to(tl.float32)
    v = tl.div_rn(v, step)
    clipped = tl.minimum(tl.maximum(v, tl.maximum(floor, lowest)), tl.minimum(ceiling, highest))
    q = tl.where(v == v, _rint(clipped), v)
    tl.store(out + start + at, (q * step).to(out.dtype.element_ty), mask=there)


@triton.jit
def _scaled(total, scale, smallest, row, factor, relative: tl.constexpr):
    # factor * total, times step^2 if `relative`; none that lowers a scale below its least value.
    found = total.to(tl.float32) * factor
    given, least = tl.load(scale + row), tl.load(smallest + row)
    if relative:
        step = tl.minimum(tl.where(given >= least, given, least), LARGEST)
        found = found * step * step
    return tl.where((given < least) & (found > 0), 0.0, found)


@triton.jit
def _sum_gradient(
    grad, a, b, out, sums, scale, smallest, zero_point, low, high, floor, ceiling, width, blocks, turns, factor,
    joins: tl.constexpr, writes: tl.constexpr, whole: tl.constexpr, relative: tl.constexpr, affine: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    # The gradient of the sum, and what `turns` blocks add to that of their row's scale: all of it, if `whole`.
    row = tl.program_id(0) // blocks
    step, lowest, highest, floor, ceiling = _grid_in_force(
        scale + row, smallest + row, zero_point, low, high, floor, ceiling, affine
    )
    total, first = tl.zeros((block,), tl.float32), (tl.program_id(0) % blocks).to(tl.int64) * turns * block
    for turn in range(turns):
        at = first + turn * block + tl.arange(0, block)
        start, there = row.to(tl.int64) * width, at < width
        v = tl.load(a + start + at, mask=there, other=0.0).to(tl.float32)
        if joins:
            v += tl.load(b + start + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(grad + start + at, mask=there, other=0.0).to(tl.float32)
        passes, slope = _passing(tl.div_rn(v, step), lowest, highest, floor, ceiling)
        if writes:
            tl.store(out + start + at, tl.where(passes, g, 0.0).to(out.dtype.element_ty), mask=there)
        total += tl.where(there, g * slope, 0.0)
    found = tl.sum(total, 0)
    if whole:
        found = _scaled(found, scale, smallest, row, factor, relative)
    tl.store(sums + tl.program_id(0), found)


@triton.jit
def _scale_gradient(sums, out, scale, smallest, parts, factor, relative: tl.constexpr, block: tl.constexpr):
    # Of the sums of each row's parts.
    row = tl.program_id(0)
    total = tl.zeros((block,), DOUBLE)
    for first in range(0, parts, block):
        at = first + tl.arange(0, block)
        total += tl.load(sums + row * parts + at, mask=at < parts, other=0.0).to(DOUBLE)
    tl.store(out + row, _scaled(tl.sum(total, 0), scale, smallest, row, factor, relative))


class Grid(NamedTuple):
    """A quantizer and the clip before it, as the kernels take them."""

    scale: Tensor
    smallest: Tensor
    zero_point: Tensor | None
    levels: Sequence[float]  # low, high, shift, factor, relative
    bounds: tuple[float, float]

    @property
    def arguments(self) -> tuple[object, ...]:
        """Pointers and numbers, in the kernels' order."""
        return self.scale, self.smallest, self.zero_point, self.levels[0], self.levels[1], *self.bounds

    @property
    def affine(self) -> bool:
        """True if there is a zero point."""
        return self.zero_point is not None

    def gradient(self, sums: Tensor) -> Tensor:
        """Return the gradient of the scales, of what the blocks of their rows added up."""
        out, rows = torch.empty_like(self.scale), self.scale.numel()
        count = sums.numel() // rows
        _scale_gradient[(rows,)](
            sums, out, self.scale, self.smallest, count, self.levels[3], relative=bool(self.levels[4]),
            block=min(BLOCK, max(32, triton.next_power_of_2(count))),
            **CHAIN_OPTIONS | {"num_warps": 1 if count <= 32 else 4},
        )  # fmt: skip
        return out

    def blocks(self, x: Tensor) -> tuple[int, int, int]:
        """Return programs for x, the length of a row with its own scale, programs a row."""
        rows = self.scale.numel()
        width = x.numel() // rows
        blocks = -(-width // BLOCK)
        return rows * blocks, width, blocks


def sum_quantize(a: Tensor, b: Tensor | None, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Return a + b, or a if b is None, clipped, on the grid; strides have to be equal."""
    out, (programs, *sizes) = torch.empty_like(a, dtype=dtype), grid.blocks(a)
    _sum_quantize[(programs,)](
        a, b, out, *grid.arguments, *sizes, joins=b is not None, affine=grid.affine, block=BLOCK, **CHAIN_OPTIONS
    )
    return out


def sum_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor | None, grid: Grid, writes: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of the sum, if it `writes` one, and of the scales."""
    programs, width, blocks = grid.blocks(a)
    whole = programs > blocks and blocks <= MOST_TURNS  # a program for each row's scale
    turns, blocks = (blocks, 1) if whole else (1, blocks)
    out = torch.empty_like(a) if writes else None
    sums = torch.empty(programs // turns, dtype=torch.float32, device=a.device)
    _sum_gradient[(programs // turns,)](
        grad, a, b, out, sums, *grid.arguments, width, blocks, turns, grid.levels[3], joins=b is not None,
        writes=writes, whole=whole, relative=bool(grid.levels[4]), affine=grid.affine, block=BLOCK, **CHAIN_OPTIONS,
    )  # fmt: skip
    return out, sums.view_as(grid.scale) if whole else grid.gradient(sums)
