"""The C kernels as functions of dense float32 tensors on the CPU."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, is_dense, numbers_at, rows_at
from qat.kernels.cpu.compiler import library
from qat.kernels.cpu.structures import Grid, GridTensors, LearnedGrid, Rows

FEW = 1 << 15
"""Elements up to which a second thread does not pay."""


def threads_for(elements: int) -> int:
    """Return the number of threads for a tensor: as many as torch uses, or one."""
    return 1 if elements <= FEW else torch.get_num_threads()


def is_plain(x: Tensor) -> bool:
    """Return True if a tensor is float32 on the CPU, and of no special subclass."""
    return x.dtype is torch.float32 and x.is_cpu and type(x) in (Tensor, torch.nn.Parameter)


def is_float32_on(x: Tensor, device: torch.device) -> bool:
    """Return True if a tensor is float32 on a device, and of no special subclass."""
    return x.dtype is torch.float32 and x.device == device and type(x) in (Tensor, torch.nn.Parameter)


def in_layout_of(x: Tensor, other: Tensor) -> Tensor:
    """Return x with its elements in the memory order of other."""
    return x if x.stride() == other.stride() else torch.empty_like(other, dtype=x.dtype).copy_(x)


def rows_of(x: Tensor, scale: Tensor) -> int:
    """Return how many consecutive rows of x have a scale of their own; 0 if none do."""
    if scale.numel() == 1:
        return 1
    axis = x.dim() - scale.dim()  # to which axis of x the first of scale belongs, if they broadcast
    rows = x.shape[0] if x.dim() else 0
    lengths = scale.shape[1:] if axis == 0 else ()
    if axis != 0 or scale.shape[0] != rows or any(length != 1 for length in lengths):
        return 0
    return rows if x.stride(0) * rows == x.numel() and scale.is_contiguous() else 0


def applies(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> bool:
    """Return True if the kernels take this tensor and this grid."""
    if not (is_plain(x) and is_plain(scale) and x.numel() and is_dense(x)):
        return False
    if zero_point is not None and not (zero_point.numel() == scale.numel() == 1 and zero_point.device.type == "cpu"):
        return False
    return bool(rows_of(x, scale)) and scale.dim() <= x.dim() and library() is not None


def _grid(scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Grid:
    return Grid(scale.item(), 0.0 if zero_point is None else integer_zero(zero_point.item(), qmin, qmax), qmin, qmax)


def integer_zero(zero_point: float, qmin: int, qmax: int) -> float:
    """Return clamp(round(zero_point), qmin, qmax); NaN stays NaN."""
    if not math.isfinite(zero_point):  # round() takes no infinity
        return min(max(zero_point, qmin), qmax) if zero_point == zero_point else zero_point
    return float(min(max(round(zero_point), qmin), qmax))


def compiled() -> Any:
    """Return the loaded library; call this only after `applies` was true."""
    found = library()
    assert found is not None
    return found


class CPUKernels:
    """The fake-quantizer in C, which `qat.functional` calls in place of its formula."""

    @staticmethod
    def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
        """Return x on the grid, in its own memory format."""
        # Axes of length 1 get the strides that torch's operations give them: a convolution chooses its format by them.
        layout = torch.contiguous_format if x.is_contiguous() else torch.preserve_format
        y = torch.empty_like(x, memory_format=layout)
        if scale.numel() > 1:
            quantize_rows(x, scale, qmin, qmax, values=y)
            return y
        compiled().fake_quantize(
            elements_at("x", x, x), elements_at("y", y, x), x.numel(), _grid(scale, zero_point, qmin, qmax),
            threads_for(x.numel()),
        )  # fmt: skip
        return y

    @staticmethod
    def gradients(
        grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
        needs: tuple[bool, ...] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Return all gradients in one pass over x and grad, without any factor."""
        grad = in_layout_of(grad, x)
        if scale.numel() > 1:
            grad_x = torch.empty_like(x) if needs[0] else None
            return grad_x, quantize_rows_backward(grad, x, scale, qmin, qmax, grad_x), None
        grad_x, total = torch.empty_like(x) if needs[0] else None, (ctypes.c_double * 2)()
        compiled().fake_quantize_backward(
            elements_at("grad", grad, x), elements_at("x", x, x), _written("grad_x", grad_x, x), x.numel(),
            _grid(scale, zero_point, qmin, qmax), total, threads_for(x.numel()),
        )  # fmt: skip
        grad_scale = torch.full_like(scale, total[0])
        return grad_x, grad_scale, None if zero_point is None else -scale.detach() * total[1]


def squared_error(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> float:
    """Return the sum of the squared differences between x and x on the grid."""
    grid = _grid(scale, zero_point, qmin, qmax)
    return float(compiled().squared_error(elements_at("x", x, x), x.numel(), grid, threads_for(x.numel())))


def _written(what: str, x: Tensor | None, pattern: Tensor, dtype: torch.dtype = torch.float32) -> int | None:
    return None if x is None else elements_at(what, x, pattern, dtype)


def _rows(
    scales: Tensor, smallest: Tensor | None, qmin: float, qmax: float, factor: float = 1.0, relative: float = 0
) -> Rows:
    count = scales.numel()
    least = None if smallest is None else numbers_at("smallest", smallest, count)
    return Rows(numbers_at("scales", scales, count), least, qmin, qmax, factor, int(relative))


def quantize_rows(
    w: Tensor, scales: Tensor, qmin: float, qmax: float, smallest: Tensor | None = None, codes: Tensor | None = None,
    values: Tensor | None = None, steps: Tensor | None = None,
) -> None:  # fmt: skip
    """Round a dense weight to symmetric grids, one per row of axis 0.

    codes, values and steps (the scales, bounded by `smallest` if it is given) are written to, in the strides of w.
    """
    rows = scales.numel()
    compiled().quantize_rows(
        rows_at("weight", w, rows), _rows(scales, smallest, qmin, qmax), _written("codes", codes, w, torch.int8),
        _written("values", values, w), None if steps is None else numbers_at("steps", steps, rows), rows,
        w.numel() // rows, threads_for(w.numel()),
    )  # fmt: skip


def quantize_rows_backward(
    grad: Tensor, w: Tensor, scales: Tensor, qmin: float, qmax: float, grad_w: Tensor | None,
    smallest: Tensor | None = None, factor: float = 1.0, relative: float = 0,
) -> Tensor:  # fmt: skip
    """Return the gradient of the scales; that of w goes to grad_w, which may be grad."""
    grad_scales, rows = torch.empty_like(scales), scales.numel()
    compiled().quantize_rows_backward(
        elements_at("grad", grad, w), rows_at("weight", w, rows), _rows(scales, smallest, qmin, qmax, factor, relative),
        _written("grad_weight", grad_w, w), numbers_at("grad_scales", grad_scales, rows), rows, w.numel() // rows,
        threads_for(w.numel()),
    )  # fmt: skip
    return grad_scales


NO_CLIP = (-math.inf, math.inf)
"""Floor and ceiling before a quantizer where nothing is clipped."""


class Levels(NamedTuple):
    """The numbers of a quantizer that are not tensors, as floats for operators."""

    low: float
    high: float
    shift: float  # added to codes and zero point, so that they fit uint8
    factor: float  # of the scale's gradient
    relative: float  # 1 if the square of the step multiplies it too, else 0


def scales_of(grid: GridTensors) -> tuple[Tensor, Tensor]:
    """Return the scale and the smallest scale of a quantizer."""
    scale, smallest, _ = grid
    assert scale is not None and smallest is not None
    return scale, smallest


def learned_grid(grid: GridTensors, levels: Sequence[float]) -> LearnedGrid:
    """Return the C kernels' view of a quantizer of one scale."""
    (scale, smallest), zero_point = scales_of(grid), grid[2]
    zero = None if zero_point is None else numbers_at("zero_point", zero_point, 1)
    low, high, shift, factor, relative = levels
    return LearnedGrid(
        numbers_at("scale", scale, 1), numbers_at("smallest", smallest, 1), zero, low, high, shift, factor,
        int(relative),
    )  # fmt: skip


def empty_scale(grid: GridTensors) -> Tensor:
    """Return memory for the gradient of a quantizer's scale."""
    return torch.empty_like(scales_of(grid)[0])


def dequantize(codes: Tensor, qparams: Tensor) -> Tensor:
    """Return (codes - zero) * step in float32, in the memory format of codes."""
    y = torch.empty_like(codes, dtype=torch.float32)
    compiled().dequantize(
        elements_at("codes", codes, codes, torch.uint8), elements_at("values", y, codes), y.numel(),
        numbers_at("step and zero", qparams, 2), threads_for(y.numel()),
    )  # fmt: skip
    return y
