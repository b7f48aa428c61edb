"""BatchNorm, clip and quantizer in as few passes over memory as they need.

Without the norm, see `quantizers`. A tensor is a matrix: of pixels and channels where channels are innermost (`last`),
else of images times channels and pixels. With v = (y * alpha + offset) / step, worked out for each channel beforehand,
the value is

    step * round(clamp(v, floor / step, ceiling / step, low - zero, high - zero))

Sums are taken tile by tile in one order, and the tiles' sums in float64, so that a step is reproducible to the bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.kernels.triton.quantizers import BLOCK as TILE
from qat.kernels.triton.quantizers import CHAIN_OPTIONS as OPTIONS
from qat.kernels.triton.quantizers import (
    DOUBLE,
    LARGEST,
    Grid,
    _grid_in_force,
    _passing,
    _rint,
    sum_quantize,
    sum_quantize_backward,
)

PARTS = 256
"""Programs that share a sum, about two for each processor of a large card."""


@triton.jit
def _tile(rows, width, channels, row, column, last: tl.constexpr, height: tl.constexpr, breadth: tl.constexpr):
    # Where a tile begins, its offsets from there, which elements exist; its channels, and which of them exist.
    r, c = row + tl.arange(0, height), column + tl.arange(0, breadth)
    start = row.to(tl.int64) * width + column
    at = tl.arange(0, height)[:, None] * width + tl.arange(0, breadth)[None, :]
    there = (r < rows)[:, None] & (c < width)[None, :]
    if last:
        channel, known = c[None, :], (c < width)[None, :]
    else:
        channel, known = (r % channels)[:, None], (r < rows)[:, None]
    return start, at, there, channel, known


@triton.jit
def _statistics(
    y, sums, rows, width, channels, turns, across,
    last: tl.constexpr, height: tl.constexpr, breadth: tl.constexpr,
):  # fmt: skip
    # Sums of y - origin and of its square; the origin is a channel's first value, so that no digits cancel.
    part, column = tl.program_id(0) // across, (tl.program_id(0) % across) * breadth
    row = part * height * (turns if last else 1)
    _, _, _, channel, known = _tile(rows, width, channels, row, column, last, height, breadth)
    first = channel if last else channel.to(tl.int64) * width
    origin = tl.load(y + first, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((height, breadth), tl.float32)
    square = tl.zeros((height, breadth), tl.float32)
    for _ in range(turns):
        start, at, there, _, _ = _tile(rows, width, channels, row, column, last, height, breadth)
        v = tl.load(y + start + at, mask=there, other=0.0).to(tl.float32)
        v = tl.where(there, v - origin, 0.0)
        total += v
        square += v * v
        row += height if last else 0
        column += 0 if last else breadth
    if last:
        place, size = part * channels + channel, tl.num_programs(0) // across * channels
    else:
        place, size = part * height + tl.arange(0, height)[:, None], rows
    axis: tl.constexpr = 0 if last else 1
    tl.store(sums + place, tl.sum(total, axis, keep_dims=True), mask=known)
    tl.store(sums + size + place, tl.sum(square, axis, keep_dims=True), mask=known)


@triton.jit
def _total(sums, parts, channels, c, there, chunk: tl.constexpr):
    # The sum of all parts for these channels, in float64.
    total = tl.zeros((c.shape[0],), DOUBLE)
    for first in range(0, parts, chunk):
        p = first + tl.arange(0, chunk)
        known = (p < parts)[:, None] & there[None, :]
        total += tl.sum(tl.load(sums + p[:, None] * channels + c[None, :], mask=known, other=0.0).to(DOUBLE), 0)
    return total


@triton.jit
def _settle(
    sums, y, running_mean, running_var, tracked, gamma, beta, scale, smallest, out, parts, channels, width, count,
    share, eps,
    follows: tl.constexpr, moves: tl.constexpr, last: tl.constexpr, chunk: tl.constexpr, breadth: tl.constexpr,
):  # fmt: skip
    # Mean, 1 / sqrt(variance + eps), alpha, and alpha and offset in steps, for each channel; moves running ones.
    c = tl.program_id(0) * breadth + tl.arange(0, breadth)
    there = c < channels
    if follows:
        origin = tl.load(y + (c if last else c.to(tl.int64) * width), mask=there, other=0.0).to(DOUBLE)
        off = _total(sums, parts, channels, c, there, chunk) / count
        variance = _total(sums + parts * channels, parts, channels, c, there, chunk) / count - off * off
        mean, variance = origin + off, tl.maximum(variance, 0.0)
        if moves:
            if tl.program_id(0) == 0:
                tl.store(tracked, tl.load(tracked) + 1)
            old = tl.load(running_mean + c, mask=there, other=0.0).to(DOUBLE)
            tl.store(running_mean + c, old + (mean - old) * share, mask=there)
            old = tl.load(running_var + c, mask=there, other=0.0).to(DOUBLE)
            tl.store(running_var + c, old + (variance * (count / (count - 1)) - old) * share, mask=there)
    else:
        mean = tl.load(running_mean + c, mask=there, other=0.0).to(DOUBLE)
        variance = tl.load(running_var + c, mask=there, other=0.0).to(DOUBLE)
    inverse = 1.0 / tl.sqrt(variance + eps)
    given, least = tl.load(scale), tl.load(smallest)
    step = tl.minimum(tl.where(given >= least, given, least), LARGEST).to(DOUBLE)
    alpha = tl.load(gamma + c, mask=there, other=0.0).to(DOUBLE) * inverse
    offset = tl.load(beta + c, mask=there, other=0.0).to(DOUBLE) - mean * alpha
    tl.store(out + c, mean, mask=there)
    tl.store(out + channels + c, inverse, mask=there)
    tl.store(out + 2 * channels + c, alpha, mask=there)
    tl.store(out + 3 * channels + c, alpha / step, mask=there)
    tl.store(out + 4 * channels + c, offset / step, mask=there)


@triton.jit
def _norm_quantize(
    y, out, known_of, scale, smallest, zero_point, low, high, floor, ceiling, rows, width, channels, across,
    affine: tl.constexpr, last: tl.constexpr, height: tl.constexpr, breadth: tl.constexpr,
):  # fmt: skip
    step, lowest, highest, floor, ceiling = _grid_in_force(
        scale, smallest, zero_point, low, high, floor, ceiling, affine
    )
    row, column = tl.program_id(0) // across * height, tl.program_id(0) % across * breadth
    start, at, there, channel, known = _tile(rows, width, channels, row, column, last, height, breadth)
    alpha = tl.load(known_of + 3 * channels + channel, mask=known, other=0.0)
    offset = tl.load(known_of + 4 * channels + channel, mask=known, other=0.0)
    v = tl.load(y + start + at, mask=there, other=0.0).to(tl.float32) * alpha + offset
    clipped = tl.minimum(tl.maximum(v, tl.maximum(floor, lowest)), tl.minimum(ceiling, highest))
    q = tl.where(v == v, _rint(clipped), v)
    tl.store(out + start + at, (q * step).to(out.dtype.element_ty), mask=there)


@triton.jit
def _norm_sums(
    grad, y, sums, known_of, scale, smallest, zero_point, low, high, floor, ceiling, rows, width, channels, turns,
    across, affine: tl.constexpr, last: tl.constexpr, height: tl.constexpr, breadth: tl.constexpr,
):  # fmt: skip
    # Sums of masked, of masked * (y - mean), and of grad * slope; masked is grad where it passes.
    _, lowest, highest, floor, ceiling = _grid_in_force(scale, smallest, zero_point, low, high, floor, ceiling, affine)
    part, column = tl.program_id(0) // across, (tl.program_id(0) % across) * breadth
    row = part * height * (turns if last else 1)
    _, _, _, channel, known = _tile(rows, width, channels, row, column, last, height, breadth)
    mean = tl.load(known_of + channel, mask=known, other=0.0)
    alpha = tl.load(known_of + 3 * channels + channel, mask=known, other=0.0)
    offset = tl.load(known_of + 4 * channels + channel, mask=known, other=0.0)
    one = tl.zeros((height, breadth), tl.float32)
    two = tl.zeros((height, breadth), tl.float32)
    three = tl.zeros((height, breadth), tl.float32)
    for _ in range(turns):
        start, at, there, _, _ = _tile(rows, width, channels, row, column, last, height, breadth)
        x = tl.load(y + start + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(grad + start + at, mask=there, other=0.0).to(tl.float32)
        passes, slope = _passing(x * alpha + offset, lowest, highest, floor, ceiling)
        masked = tl.where(passes, g, 0.0)
        one += masked
        two += masked * (x - mean)
        three += tl.where(there, g * slope, 0.0)
        row += height if last else 0
        column += 0 if last else breadth
    if last:
        place, size = part * channels + channel, tl.num_programs(0) // across * channels
    else:
        place, size = part * height + tl.arange(0, height)[:, None], rows
    axis: tl.constexpr = 0 if last else 1
    tl.store(sums + place, tl.sum(one, axis, keep_dims=True), mask=known)
    tl.store(sums + size + place, tl.sum(two, axis, keep_dims=True), mask=known)
    tl.store(sums + 2 * size + place, tl.sum(three, axis, keep_dims=True), mask=known)


@triton.jit
def _settle_sums(
    sums, known_of, out, parts, channels, count,
    follows: tl.constexpr, chunk: tl.constexpr, breadth: tl.constexpr,
):  # fmt: skip
    # The gradients of gamma and beta, what the batch's statistics take off y's gradient, and the scale's sum.
    c = tl.program_id(0) * breadth + tl.arange(0, breadth)
    there = c < channels
    one = _total(sums, parts, channels, c, there, chunk)
    two = _total(sums + parts * channels, parts, channels, c, there, chunk)
    inverse = tl.load(known_of + channels + c, mask=there, other=0.0).to(DOUBLE)
    tl.store(out + c, two * inverse, mask=there)
    tl.store(out + channels + c, one, mask=there)
    tl.store(out + 2 * channels + c, (one / count) if follows else one * 0.0, mask=there)
    tl.store(out + 3 * channels + c, (two / count * inverse * inverse) if follows else one * 0.0, mask=there)
    three = _total(sums + 2 * parts * channels, parts, channels, c, there, chunk)
    tl.store(out + 4 * channels + c, three, mask=there)


@triton.jit
def _norm_gradient(
    grad, y, out, known_of, settled, scale, smallest, zero_point, low, high, floor, ceiling, rows, width, channels,
    across, affine: tl.constexpr, last: tl.constexpr, height: tl.constexpr, breadth: tl.constexpr,
):  # fmt: skip
    # alpha * (masked - mean(masked) - (y - mean) * mean(masked * (y - mean)) * inverse^2)
    _, lowest, highest, floor, ceiling = _grid_in_force(scale, smallest, zero_point, low, high, floor, ceiling, affine)
    row, column = tl.program_id(0) // across * height, tl.program_id(0) % across * breadth
    start, at, there, channel, known = _tile(rows, width, channels, row, column, last, height, breadth)
    mean = tl.load(known_of + channel, mask=known, other=0.0)
    factor = tl.load(known_of + 2 * channels + channel, mask=known, other=0.0)
    alpha = tl.load(known_of + 3 * channels + channel, mask=known, other=0.0)
    offset = tl.load(known_of + 4 * channels + channel, mask=known, other=0.0)
    first = tl.load(settled + 2 * channels + channel, mask=known, other=0.0)
    second = tl.load(settled + 3 * channels + channel, mask=known, other=0.0)
    x = tl.load(y + start + at, mask=there, other=0.0).to(tl.float32)
    g = tl.load(grad + start + at, mask=there, other=0.0).to(tl.float32)
    passes, _ = _passing(x * alpha + offset, lowest, highest, floor, ceiling)
    found = factor * (tl.where(passes, g, 0.0) - first - (x - mean) * second)
    tl.store(out + start + at, found.to(out.dtype.element_ty), mask=there)


class Shape(NamedTuple):
    """A tensor as a matrix of tiles."""

    rows: int
    width: int
    channels: int
    last: bool  # channels are innermost: the width
    height: int  # of a tile
    breadth: int

    @classmethod
    def of(cls, outer: int, channels: int, inner: int) -> "Shape":
        """Return the shape of the lengths of `sizes_of`."""
        last = inner == 1
        rows, width = (outer, channels) if last else (outer * channels, inner)
        breadth = min(128 if last else 256, max(16, triton.next_power_of_2(width)))
        return cls(rows, width, channels, last, TILE // breadth, breadth)

    @property
    def across(self) -> int:
        """Tiles from left to right."""
        return -(-self.width // self.breadth)

    @property
    def tiles(self) -> tuple[int]:
        """The launch grid for a program a tile."""
        return (-(-self.rows // self.height) * self.across,)

    def shares(self) -> tuple[int, int, int, int]:
        """Return programs, tiles of each, programs across, and the sums of a channel."""
        down = -(-self.rows // self.height)
        if not self.last:
            return down, self.across, 1, self.rows // self.channels
        turns = -(-down // max(1, min(down, PARTS * 4 // self.across, PARTS)))
        parts = -(-down // turns)
        return parts * self.across, turns, self.across, parts

    @property
    def options(self) -> dict[str, int]:
        """Constants of the kernels over tiles."""
        return {"last": self.last, "height": self.height, "breadth": self.breadth, **OPTIONS}


class Norm(NamedTuple):
    """A BatchNorm: what it learns, what it keeps, and how it takes part in a step."""

    gamma: Tensor
    beta: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    tracked: Tensor | None  # how many batches it has seen
    eps: float
    share: float | None  # how far the running statistics move; None: they do not
    follows: bool  # the statistics are the batch's


CHUNK, FEW = 32, 16
"""Sums and channels that a program of the small kernels reads at once."""


def settled_norm(y: Tensor, shape: Shape, norm: Norm, grid: Grid) -> Tensor:
    """Return a row of each number of `_settle`, and move running statistics in place."""
    programs, turns, across, parts = shape.shares()
    sums = y.new_empty((2, parts, shape.channels) if norm.follows else (1,), dtype=torch.float32)
    if norm.follows:
        _statistics[(programs,)](y, sums, shape.rows, shape.width, shape.channels, turns, across, **shape.options)
    out = y.new_empty((5, shape.channels), dtype=torch.float32)
    kept = (norm.gamma if each is None else each for each in (norm.running_mean, norm.running_var, norm.tracked))
    _settle[(-(-shape.channels // FEW),)](
        sums, y, *kept, norm.gamma, norm.beta, grid.scale, grid.smallest, out, parts, shape.channels, shape.width,
        float(y.numel() // shape.channels), norm.share or 0.0, norm.eps, follows=norm.follows,
        moves=norm.share is not None, last=shape.last, chunk=CHUNK, breadth=FEW, **OPTIONS,
    )  # fmt: skip
    return out


def norm_quantize(y: Tensor, shape: Shape, known: Tensor, grid: Grid) -> Tensor:
    """Return the values on the grid, in the memory format of y."""
    out = torch.empty_like(y)
    _norm_quantize[shape.tiles](
        y, out, known, *grid.arguments, shape.rows, shape.width, shape.channels, shape.across, affine=grid.affine,
        **shape.options,
    )  # fmt: skip
    return out


def norm_quantize_backward(
    grad: Tensor, y: Tensor, shape: Shape, known: Tensor, grid: Grid, follows: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, gamma, beta and scale; grad has y's memory format."""
    programs, turns, across, parts = shape.shares()
    sums = y.new_empty((3, parts, shape.channels), dtype=torch.float32)
    sizes = (shape.rows, shape.width, shape.channels)
    _norm_sums[(programs,)](
        grad, y, sums, known, *grid.arguments, *sizes, turns, across, affine=grid.affine, **shape.options
    )
    settled = y.new_empty((5, shape.channels), dtype=torch.float32)
    _settle_sums[(-(-shape.channels // FEW),)](
        sums, known, settled, parts, shape.channels, float(y.numel() // shape.channels), follows=follows, chunk=CHUNK,
        breadth=FEW, **OPTIONS,
    )  # fmt: skip
    out = torch.empty_like(y)
    _norm_gradient[shape.tiles](
        grad, y, out, known, settled, *grid.arguments, *sizes, shape.across, affine=grid.affine, **shape.options
    )
    return out, settled[0], settled[1], grid.gradient(settled[4])


def works(x: Tensor, scale: Tensor) -> bool:
    """Return True if the kernels are right for [0.26, -9.0, 0.5] and a step of 0.5."""
    grid = Grid(scale, scale / 32, None, (-8.0, 7.0, 0.0, 1.0, 0.0), (0.0, 6.0))
    y, shape, ones = x.view(3, 1), Shape.of(3, 1, 1), torch.ones_like(x[:1])
    known = settled_norm(y, shape, Norm(ones, ones * 0, ones * 0, ones, None, 0.0, None, False), grid)
    found: list[Tensor | None] = [norm_quantize(y, shape, known, grid), sum_quantize(x, x, grid, x.dtype)]
    found += [norm_quantize_backward(y, y, shape, known, grid, False)[0], sum_quantize_backward(x, x, x, grid, True)[0]]
    wanted = [[0.5, 0, 0.5], [0.5, 0, 1], [0.26, 0, 0.5], [0.26, 0, 0.5]]
    pairs = zip(found, wanted, strict=True)
    return all(each is not None and torch.allclose(each.flatten(), x.new_tensor(values)) for each, values in pairs)
