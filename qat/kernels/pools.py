"""Max pooling of codes: (N, C, H, W), channels innermost or images."""

import torch
from torch import Tensor

from qat.kernels.cpu import compiled, like, threads_for
from qat.kernels.formulas import pools as formulas
from qat.kernels.operator import operator
from qat.kernels.structures import Pool

LARGEST_WINDOW = 256
"""Elements of a window: which of them was the largest is kept in one byte."""


def _layout(codes: Tensor) -> torch.memory_format:
    return torch.contiguous_format if codes.is_contiguous() else torch.channels_last


def _pooled(
    codes: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    sizes = [
        formulas.pooled_size(*numbers, ceil_mode)
        for numbers in zip(codes.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    out = torch.empty((*codes.shape[:2], *sizes), dtype=torch.uint8, memory_format=_layout(codes))
    return out, torch.empty_like(out)


@operator(_pooled, formulas.max_pool_codes)
def max_pool_codes(
    codes: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """The largest code of every window and its number in the window; arguments as of torch's max_pool2d."""
    out, where = _pooled(codes, kernel, stride, padding, dilation, ceil_mode)
    pool = Pool(*codes.shape, *out.shape[2:], *kernel, *stride, *padding, *dilation)
    nearest = int(not codes.is_contiguous())
    compiled().max_pool(
        codes.data_ptr(), out.data_ptr(), where.data_ptr(), pool, nearest, threads_for(codes.numel())
    )  # fmt: skip
    return out, where


def _unpooled(grad: Tensor, where: Tensor, height: int, width: int, *rest: object) -> Tensor:
    return torch.empty((*where.shape[:2], height, width), dtype=grad.dtype, memory_format=_layout(where))


@operator(_unpooled, formulas.max_pool_codes_backward)
def max_pool_codes_backward(
    grad: Tensor, where: Tensor, height: int, width: int, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int],
) -> Tensor:  # fmt: skip
    """The gradient of what was pooled, images of height x width."""
    grad, grad_in = like(grad, where), _unpooled(grad, where, height, width)
    pool = Pool(*grad_in.shape, *where.shape[2:], *kernel, *stride, *padding, *dilation)
    nearest = int(not where.is_contiguous())
    compiled().max_pool_backward(
        grad.data_ptr(), where.data_ptr(), grad_in.data_ptr(), pool, nearest, threads_for(grad_in.numel())
    )
    return grad_in
