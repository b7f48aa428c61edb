"""How the Triton kernels see a tensor: as a matrix over its storage, with one scale per row or per column."""

import functools
import math
from typing import NamedTuple

TILE_BYTES = 8192
"""Bytes of x in one tile: 64, which is four 16-byte accesses, for each of the 128 threads of a program."""

WIDTHS = (4096, 1024, 256, 64, 16)
"""The widths that a tile may have. There are few, because each is a kernel to compile."""


class Layout(NamedTuple):
    """A dense tensor in the order of its memory: (outer, repeats, channels, inner).

    The scales have the shape (outer, channels). With one scale, all elements are inner. A weight with scales on axis 0
    is (1, 1, C, inner) in any memory format. Activations per channel are (1, N, C, H*W), in channels_last
    (1, N*H*W, C, 1). outer is a second axis of scales, apart from the first in memory (a grouped convolution in
    channels_last).
    """

    outer: int
    repeats: int
    channels: int
    inner: int

    @property
    def per_column(self) -> bool:
        """Whether the channels are innermost, so that neighbours in memory have different scales."""
        return self.inner == 1 and self.outer == 1 and self.channels > 1

    @property
    def height(self) -> int:
        """Rows of the matrix."""
        return self.repeats if self.per_column else self.outer * self.repeats * self.channels

    @property
    def width(self) -> int:
        """Columns of the matrix, which are neighbours in memory."""
        return self.channels if self.per_column else self.inner

    @property
    def cycle(self) -> int:
        """Rows after which the next row of scales begins."""
        return self.repeats * self.channels


class Tiling(NamedTuple):
    """Tiles of rows x cols over a Layout: `across` of them side by side, `down` programs below each other."""

    rows: int
    cols: int
    steps: int
    across: int
    down: int


@functools.lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], stride: tuple[int, ...], scale_shape: tuple[int, ...]) -> Layout | None:
    """The Layout of a tensor, whose shape and strides are given, and its scales.

    None if x is not dense (gaps, or expanded), scale_shape does not broadcast to shape, or the axes with scales
    alternate with the others in memory more often than a Layout can express.

    >>> layout_of((8, 3, 5, 5), (75, 25, 5, 1), (8, 1, 1, 1))
    Layout(outer=1, repeats=1, channels=8, inner=75)
    >>> layout_of((8, 3, 5, 5), (75, 1, 15, 3), (1, 3, 1, 1))  # channels_last
    Layout(outer=1, repeats=200, channels=3, inner=1)
    """
    if len(scale_shape) > len(shape):
        return None
    scales = (1,) * (len(shape) - len(scale_shape)) + scale_shape
    if any(count not in (1, size) for count, size in zip(scales, shape, strict=True)):
        return None
    if 0 in shape:
        return Layout(1, 1, 1, 0)  # nothing to process
    axes = sorted((axis for axis, size in enumerate(shape) if size > 1), key=lambda axis: stride[axis], reverse=True)
    expected = math.prod(shape)
    for axis in axes:  # outermost first
        expected //= shape[axis]
        if stride[axis] != expected:
            return None
    own = [axis for axis in axes if scales[axis] > 1]
    if own != sorted(own):
        return None  # the scales lie in another order than the memory of x
    runs: list[tuple[bool, int]] = []
    for axis in axes:
        scaled, size = scales[axis] > 1, shape[axis]
        if runs and runs[-1][0] == scaled:
            size *= runs.pop()[1]
        runs.append((scaled, size))
    # From the inside out: inner (shared), channels (scaled), repeats (shared), outer (scaled).
    sizes = [runs.pop()[1] if runs and runs[-1][0] == scaled else 1 for scaled in (False, True, False, True)]
    return None if runs else Layout(*reversed(sizes))


@functools.lru_cache(maxsize=4096)
def tiling_of(layout: Layout, itemsize: int, sums: bool) -> Tiling:
    """The tiles for a Layout of elements of `itemsize` bytes.

    With `sums`, a program sums over what it reads, and processes more rows where the sums are long.

    >>> tiling_of(Layout(1, 1, 512, 4608), 4, True)
    Tiling(rows=2, cols=1024, steps=1, across=5, down=256)
    """
    tile = TILE_BYTES // itemsize
    steps = 1
    if layout.per_column:
        cols = 16 if layout.width <= 16 else 64  # narrow and tall: few partial sums, and rows of whole sectors
        rows = tile // cols
        steps = 4 if sums and layout.height >= 4 * rows else 1
    elif layout.height == 1:
        rows, cols = 1, tile
    else:
        cols = _width_of_tiles(layout.width, tile)
        rows = tile // cols
    return Tiling(rows, cols, steps, -(-layout.width // cols), -(-layout.height // (rows * steps)))


def _width_of_tiles(width: int, tile: int) -> int:
    """The widest tile that leaves at most an eighth idle at the ends of the rows, or else the one that idles least.

    It is narrower than a whole tile, because kernels take ROWS == 1 to mean that the matrix has a single row.
    """
    idle = {cols: (-width % cols) / width for cols in WIDTHS if cols < tile}
    return next((cols for cols, share in idle.items() if share <= 1 / 8), min(idle, key=lambda cols: idle[cols]))
