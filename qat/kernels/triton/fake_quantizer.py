"""The affine fake-quantizer on CUDA, in Triton: one pass for the values, one for all the gradients.

The reference is `LSQFunction` and `LSQPlusFunction` in qat/functional. The values are the same to the bit, except that
zero has no sign here; the gradients are summed in another order. x may be float16, bfloat16 or float32. The arithmetic
is float32, with correctly rounded division (the GPU's fast division rounds ties to other levels).

Triton is loaded on first use. With TRITON_INTERPRET=1 in the environment the kernels run on CPU tensors, slowly.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from qat.kernels.triton.layout import Layout, Tiling, layout_of, tiling_of
from qat.kernels.triton.trial import Gradients, Kind, difference, plain_gradients, plain_quantize

Result = TypeVar("Result")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALE_DTYPES = (*DTYPES, torch.float64)
ZERO_POINT_DTYPES = (*SCALE_DTYPES, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MAGIC_LIMIT = 2**22
"""Grids with larger bounds need the kernels' slower rounding."""
INDEX_LIMIT = 2**31
"""Offsets from here on need 64 bits."""

WARPS = 4

log = logging.getLogger("qat.kernels")


@functools.cache
def kernels() -> Any | None:
    """The module of the kernels, or None if triton is not installed."""
    from qat.kernels.triton import kernels as loaded

    return loaded if loaded.triton is not None else None


def may_run_on(device: torch.device) -> bool:
    """Whether loading triton makes sense for this device."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


_refused: set[torch.device] = set()
"""Devices on which a kernel failed or was wrong."""


def runs(kind: Kind) -> bool:
    """Whether the kernels of a kind run: on CUDA, or on the CPU under the interpreter. One trial decides.

    The trial is needed because triton also requires a C compiler, a GPU that it knows and a cache folder.
    """
    return may_run_on(kind.device) and kernels() is not None and kind.device not in _refused and _is_right(kind)


@functools.cache
def _is_right(kind: Kind) -> bool:
    try:
        wrong = difference(kind, quantize, gradients)
    except Exception as error:  # the plain formula works in any case
        refuse(kind.device, error)
        return False
    if wrong is not None:
        refuse(kind.device, wrong)
    return wrong is None


def refuse(device: torch.device, reason: Exception | str) -> None:
    """Stop using the kernels on this device, and log it once."""
    if device not in _refused:
        _refused.add(device)
        words = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}".splitlines()[0]
        log.warning("Triton's kernels are not used on %s (%s): the plain formula is, slower", device, words)


def applies(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> bool:
    """Whether `quantize` and `gradients` take these tensors. It reads shapes only, and does not wait for the device.

    Plain tensors on one device; x float16, bfloat16 or float32 and dense in any memory format; scale floating point,
    broadcastable to x; zero_point in the shape of scale. The caller excludes tensors without a storage, as
    under torch.compile or torch.func.

    >>> applies(torch.zeros(3, dtype=torch.float64), torch.tensor(0.5))
    False
    """
    if x.dtype not in DTYPES or scale.dtype not in SCALE_DTYPES:
        return False
    if zero_point is not None and (zero_point.dtype not in ZERO_POINT_DTYPES or zero_point.shape != scale.shape):
        return False
    for tensor in (x, scale, zero_point):
        if tensor is not None and (type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device != x.device):
            return False
    layout = _layout(x, scale)
    if layout is None:
        return False
    places = "one" if scale.numel() == 1 else "columns" if layout.per_column else "rows"
    zero_dtype = None if zero_point is None else zero_point.dtype
    return runs(Kind(x.device, x.dtype, scale.dtype, zero_dtype, places))


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """y = scale * (clamp(round(x / scale) + z, qmin, qmax) - z) with z = clamp(round(zero_point), qmin, qmax).

    Takes tensors for which `applies` is true; without a zero point z is 0. y has the shape, dtype and memory format of
    x, and NaN where x is NaN.

    Raises:
        ValueError: if the kernels do not support the layout of x.
    """
    layout, y = _require_layout(x, scale), torch.empty_like(x)
    if x.numel():
        tiling = tiling_of(layout, x.element_size(), sums=False)
        _launch("quantize_tiles", (x, y, _flat(scale), _flat(zero_point)), (qmin, qmax), layout, tiling, {})
    return y


def gradients(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
    needs: tuple[bool, ...] = (True, True, True),
) -> Gradients:  # fmt: skip
    """The gradients of `quantize` as `LSQPlusFunction` declares them, without grad_factor, from one pass over x.

    The gradients of scale and zero point are summed in two stages, by program and then over the programs, in a fixed
    order: the same inputs give the same bits.

    grad has the shape of x; it is copied if its strides are not those of x. grad_x is like x, the others are float32 in
    the shape of scale; each is None where `needs` says that it is not needed.

    Raises:
        ValueError: if the kernels do not support the layout of x.
    """
    wants_x, wants_scale, wants_zero = needs[0], needs[1], needs[2] and zero_point is not None
    layout = _require_layout(x, scale)
    tiling = tiling_of(layout, x.element_size(), sums=True)
    # (scale and zero point, outer, repeats or programs, channels, programs): axes 2 and 4 are summed below.
    if layout.per_column:
        places = (1, tiling.down, layout.channels, 1)
    else:
        places = (layout.outer, layout.repeats, layout.channels, tiling.across)
    parts = torch.empty((wants_scale + wants_zero, *places), dtype=torch.float32, device=x.device)
    grad_x = torch.empty_like(x) if wants_x else None
    scale_sums = parts[0] if wants_scale else None
    zero_sums = parts[-1] if wants_zero else None
    if x.numel() and (wants_x or len(parts)):
        inputs = (_strided_like(grad, x), x, _flat(scale), _flat(zero_point), grad_x, scale_sums, zero_sums)
        _launch("gradient_tiles", inputs, (qmin, qmax), layout, tiling, {"STEPS": tiling.steps})
    sums = parts.sum((2, 4)) if x.numel() else parts.new_zeros((len(parts), scale.numel()))
    grad_scale = sums[0].view(scale.shape) if wants_scale else None
    grad_zero = sums[-1].view(scale.shape) if wants_zero else None
    return grad_x, grad_scale, grad_zero


def _launch(
    name: str, tensors: tuple[Tensor | None, ...], bounds: tuple[int, int], layout: Layout, tiling: Tiling,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    """Run one of the kernels on the device of its first tensor."""
    first = tensors[0]
    assert first is not None
    numel = layout.height * layout.width
    shared = {
        "PER_COLUMN": layout.per_column,
        "LARGE": max(abs(bounds[0]), abs(bounds[1]), bounds[1] - bounds[0]) > MAGIC_LIMIT,
        # In the last tiles, offsets run past the end.
        "LONG": numel + (tiling.rows * tiling.steps + 1) * max(layout.width, tiling.cols) >= INDEX_LIMIT,
        "ROWS": tiling.rows,
        "COLS": tiling.cols,
        "num_warps": WARPS,
        "enable_fp_fusion": False,  # product, then sum, as torch does
    }
    sizes = (layout.height, layout.width, layout.cycle, layout.channels, tiling.across)
    kernel = getattr(kernels(), name)[(tiling.across * tiling.down,)]
    with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
        kernel(*tensors, float(bounds[0]), float(bounds[1]), *sizes, **shared, **constants)


def _layout(x: Tensor, scale: Tensor) -> Layout | None:
    return layout_of(tuple(x.shape), x.stride(), tuple(scale.shape))


def _require_layout(x: Tensor, scale: Tensor) -> Layout:
    layout = _layout(x, scale)
    if layout is None:
        raise ValueError(
            f"no kernel for x of shape {tuple(x.shape)} and strides {x.stride()} with a scale of shape "
            f"{tuple(scale.shape)}; ask applies() first"
        )
    return layout


def _flat(grid: Tensor | None) -> Tensor | None:
    """Scales or zero points as the kernels index them; copied only if they are expanded or transposed."""
    return None if grid is None else grid.detach().reshape(-1).contiguous()  # reshape keeps strides of 0


def _strided_like(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient in the memory order of x; copied if it is expanded (as from y.sum()) or in another format."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


def _or_plainly(kernel: Callable[..., Result], plain: Callable[..., Result]) -> Callable[..., Result]:
    """The kernel, or the plain formula if it fails for sizes or bounds that no trial covered."""

    @functools.wraps(kernel)
    def call(x: Tensor, *rest: Any, **options: Any) -> Result:
        try:
            return kernel(x, *rest, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            refuse(x.device, error)
            return plain(x, *rest, **options)

    return call


class TritonKernels:
    """The fake-quantizer in Triton; see `qat.kernels.dispatch.Kernels`."""

    quantize = staticmethod(_or_plainly(quantize, plain_quantize))
    gradients = staticmethod(_or_plainly(gradients, plain_gradients))
