"""A trial of each kind of Triton kernel before its first use, against the plain formula on the same device.

The formulas are those of `LSQPlusFunction` in qat/functional, in float32 and not differentiable themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qat.kernels.formulas.grids import slopes

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Kind(NamedTuple):
    """What a kernel is compiled for; each kind is a kernel of its own.

    Attributes:
        device: that of all tensors.
        dtype, scale_dtype, zero_dtype: those of x, scale and zero point; the last is None without a zero point.
        places: whether there is "one" scale, or one for each of the "rows" or "columns".
    """

    device: torch.device
    dtype: torch.dtype
    scale_dtype: torch.dtype
    zero_dtype: torch.dtype | None
    places: str


def plain_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """y = scale * (clamp(round(x / scale) + z, qmin, qmax) - z), in x's dtype."""
    step, zero, v = _ratio(x, scale, zero_point, qmin, qmax)
    return ((torch.clamp(v.round() + zero, qmin, qmax) - zero) * step).to(x.dtype)


def plain_gradients(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
    needs: tuple[bool, ...] = (True, True, True),
) -> Gradients:  # fmt: skip
    """The gradients of x, scale and zero point, as `qat.kernels.triton.fake_quantizer.gradients` gives them."""
    step, zero, v = _ratio(x, scale, zero_point, qmin, qmax)
    inside, slope = slopes(v, qmin - zero, qmax - zero)
    full = grad.to(torch.float32)
    of_zero = full * torch.where(inside, 0.0, -step)
    return (
        torch.where(inside, grad, 0).to(x.dtype) if needs[0] else None,
        (full * slope).sum_to_size(scale.shape) if needs[1] else None,
        None if zero_point is None or not needs[2] else of_zero.sum_to_size(scale.shape),
    )


def difference(kind: Kind, quantize: Callable[..., Tensor], gradients: Callable[..., Gradients]) -> str | None:
    """What the kernels of this kind get wrong; None if they are right. Exceptions of the kernels pass through.

    The values include ties, values beyond the bounds, infinities and a NaN; the sizes leave the last tiles half empty.
    All numbers are chosen so that no sum is rounded.
    """
    reach, rows, columns = 8, 37, 53
    count = torch.arange(rows * columns, device=kind.device).reshape(rows, columns)
    x, grad = ((count % 61 - 30) * 0.25).to(kind.dtype), ((count % 7 - 3) * 0.5).to(kind.dtype)
    for place, value in enumerate((float("inf"), float("-inf"), float("nan"))):
        x[3, place] = value
    shape = {"one": (), "rows": (rows, 1), "columns": (columns,)}[kind.places]
    places = torch.arange(torch.Size(shape).numel(), device=kind.device).reshape(shape)
    scale = torch.exp2((places % 3 - 1).to(torch.float32)).to(kind.scale_dtype)
    grid = (scale, None if kind.zero_dtype is None else (places % 5).to(kind.zero_dtype), -reach, reach - 1)
    if not _same(quantize(x, *grid), plain_quantize(x, *grid)):
        return "its values are wrong"
    x = x.nan_to_num(0.0, 100.0, -100.0)  # a NaN would make all sums NaN
    if not all(map(_same, gradients(grad, x, *grid), plain_gradients(grad, x, *grid))):
        return "its gradients are wrong"
    return None


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.dtype is expected.dtype and torch.equal(found.nan_to_num(99.0), expected.nan_to_num(99.0))


def _ratio(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> tuple[Tensor, Tensor, Tensor]:
    step = scale.detach().to(torch.float32)
    zero = (
        torch.zeros_like(step)
        if zero_point is None
        else zero_point.detach().to(torch.float32).round().clamp(qmin, qmax)
    )
    return step, zero, x.detach().to(torch.float32) / step
