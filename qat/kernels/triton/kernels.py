# ruff: noqa: N803 - constants of a kernel are written in capitals
"""The Triton kernels of the affine fake-quantizer: one pass over the storage of x, seen as a matrix of tiles.

Loaded by `qat.kernels.triton.fake_quantizer` on first use, never by `import qat`. Without triton the file can still be
imported, but nothing in it can be called.

A kernel sees x as (height, width). Its programs process tiles of ROWS x COLS. A whole row has one scale, or, with
PER_COLUMN (channels innermost in memory), a whole column has. `qat.kernels.triton.layout` chooses the view.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
except ImportError:  # a torch without CUDA comes without triton
    triton = tl = None

if TYPE_CHECKING:
    constexpr = int
    tensor = Any
elif tl is not None:  # triton's compiler reads these annotations, and accepts no others
    constexpr, tensor = tl.constexpr, tl.tensor
else:
    constexpr = tensor = Any

jit: Callable[[Callable[..., Any]], Any] = triton.jit if triton is not None else lambda function: function
interpreted: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether these kernels run in Triton's interpreter, also on CPU tensors (TRITON_INTERPRET=1 at first use)."""


@jit
def clamped(v: tensor, low: tensor, high: tensor) -> tensor:
    """clamp(v, low, high) that keeps NaN, like torch's and unlike the GPU's plain minimum."""
    above = tl.maximum(v, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(above, high, propagate_nan=tl.PropagateNan.ALL)


@jit
def rounded(v: tensor, LARGE: constexpr) -> tensor:
    """v rounded half to even; v is clamped already, and NaN stays NaN.

    Up to 2^22, two additions do it: v + 1.5 * 2^23 has no fraction bits left, so the addition itself rounds half to
    even. The GPU's own instruction has an eighth of an addition's rate. LARGE grids are rounded the slower way.
    """
    if LARGE:
        below = tl.floor(v)
        rest = v - below
        odd = below - 2.0 * tl.floor(below * 0.5)
        result = tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), below + 1.0, below)
    else:
        result = (v + 12582912.0) - 12582912.0
    return result


@jit
def grid_at(
    scale: tensor, zero_point: tensor, channel: tensor, there: tensor, qmin: tensor, qmax: tensor, LARGE: constexpr
) -> tensor:
    """Step, and lowest and highest integer before the zero point is added, in float32."""
    step = tl.load(scale + channel, mask=there, other=1.0).to(tl.float32)
    if zero_point is None:
        low = qmin
        high = qmax
    else:
        zero = rounded(clamped(tl.load(zero_point + channel, mask=there, other=0).to(tl.float32), qmin, qmax), LARGE)
        low = qmin - zero
        high = qmax - zero
    return step, low, high


@jit
def tile_at(
    x: tensor, scale: tensor, zero_point: tensor, qmin: tensor, qmax: tensor, band: tensor, col: tensor,
    height: tensor, width: tensor, cycle: tensor, channels: tensor, PER_COLUMN: constexpr, LARGE: constexpr,
    ROWS: constexpr,
) -> tensor:  # fmt: skip
    """Of the tile in a band of ROWS rows: the elements' offsets, which of them are there, x / step, and their grid."""
    if ROWS == 1:  # height is 1: offsets consist of col alone, so they stay aligned for 16-byte accesses
        row = tl.arange(0, 1)[:, None]
        offset = col
        there = col < width
    else:
        row = band * ROWS + tl.arange(0, ROWS)[:, None]
        offset = row * width + col
        there = (row < height) & (col < width)
    if PER_COLUMN:
        step, low, high = grid_at(scale, zero_point, col, col < width, qmin, qmax, LARGE)
    else:
        channel = row // cycle * channels + row % channels
        step, low, high = grid_at(scale, zero_point, channel, row < height, qmin, qmax, LARGE)
    return offset, there, tl.div_rn(tl.load(x + offset, mask=there).to(tl.float32), step), step, low, high


@jit
def quantize_tiles(
    x: tensor, y: tensor, scale: tensor, zero_point: tensor, qmin: tensor, qmax: tensor, height: tensor, width: tensor,
    cycle: tensor, channels: tensor, across: tensor, PER_COLUMN: constexpr, LARGE: constexpr, LONG: constexpr,
    ROWS: constexpr, COLS: constexpr,
) -> None:  # fmt: skip
    """Write y, one tile per program. `across` is the number of tiles side by side in the width."""
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    col = (program % across) * COLS + tl.arange(0, COLS)[None, :]
    band = program // across
    offset, there, v, step, low, high = tile_at(
        x, scale, zero_point, qmin, qmax, band, col, height, width, cycle, channels, PER_COLUMN, LARGE, ROWS
    )
    level = rounded(clamped(v, low, high), LARGE)  # = clamp(round(v), low, high): the bounds are integers
    tl.store(y + offset, level * step, mask=there)


@jit
def gradient_tiles(
    grad: tensor, x: tensor, scale: tensor, zero_point: tensor, grad_x: tensor, scale_sums: tensor, zero_sums: tensor,
    qmin: tensor, qmax: tensor, height: tensor, width: tensor, cycle: tensor, channels: tensor, across: tensor,
    PER_COLUMN: constexpr, LARGE: constexpr, LONG: constexpr, ROWS: constexpr, COLS: constexpr, STEPS: constexpr,
) -> None:  # fmt: skip
    """Write grad_x, and for every row (column) of the tile its part of the sums for scale and zero point.

    A program processes STEPS tiles, one below the other; None for an output means that it is not needed. The sums have
    the shape (height, across), or with PER_COLUMN (programs below each other, width).
    """
    program = tl.program_id(0)
    if LONG:
        program = program.to(tl.int64)
    col = (program % across) * COLS + tl.arange(0, COLS)[None, :]
    scale_sum = tl.zeros((ROWS, COLS), tl.float32)
    zero_sum = tl.zeros((ROWS, COLS), tl.float32)
    for turn in range(STEPS):
        band = (program // across) * STEPS + turn
        offset, there, v, step, low, high = tile_at(
            x, scale, zero_point, qmin, qmax, band, col, height, width, cycle, channels, PER_COLUMN, LARGE, ROWS
        )
        given = tl.load(grad + offset, mask=there)
        bounded = clamped(v, low, high)
        inside = bounded == v
        if grad_x is not None:
            tl.store(grad_x + offset, tl.where(inside, given, 0.0), mask=there)
        if scale_sums is not None:
            slope = tl.where(inside, rounded(bounded, LARGE) - v, bounded)
            scale_sum += tl.where(there, given.to(tl.float32) * slope, 0.0)
        if zero_sums is not None:
            zero_sum += tl.where(there, given.to(tl.float32) * tl.where(inside, 0.0, -step), 0.0)
    if PER_COLUMN:
        place = (program // across) * width + (program % across) * COLS + tl.arange(0, COLS)
        wanted = (program % across) * COLS + tl.arange(0, COLS) < width
    else:
        line = (program // across) * ROWS + tl.arange(0, ROWS)
        place = line * across + program % across
        wanted = line < height
    if scale_sums is not None:
        tl.store(scale_sums + place, tl.sum(scale_sum, axis=0 if PER_COLUMN else 1), mask=wanted)
    if zero_sums is not None:
        tl.store(zero_sums + place, tl.sum(zero_sum, axis=0 if PER_COLUMN else 1), mask=wanted)
