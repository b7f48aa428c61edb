"""Max pooling of codes (N, C, H, W), contiguous or channels_last."""

import math

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at
from qat.kernels.cpu.quantizers import compiled, like, threads_for
from qat.kernels.cpu.structures import Pool
from qat.kernels.formulas import pools as formulas
from qat.kernels.operators.operator import operator

LARGEST_WINDOW = 256
"""Most elements of a window, because the place of the largest one is stored in one byte."""


def _pooled(
    codes: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    sizes = formulas.pooled_sizes(codes, kernel, stride, padding, dilation, ceil_mode)
    out = torch.empty((*codes.shape[:2], *sizes), dtype=torch.uint8, memory_format=formulas.layout_of(codes))
    return out, torch.empty_like(out)


@operator(_pooled, formulas.max_pool_codes)
def max_pool_codes(
    codes: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """The largest code of every window and its place in the window; arguments as for torch's max_pool2d."""
    out, where = _pooled(codes, kernel, stride, padding, dilation, ceil_mode)
    pool = _pool(codes.shape, out.shape, kernel, stride, padding, dilation)
    nearest = int(not codes.is_contiguous())
    compiled().max_pool(
        elements_at("codes", codes, codes, torch.uint8), elements_at("maxima", out, out, torch.uint8),
        elements_at("places", where, out, torch.uint8), pool, nearest, threads_for(codes.numel()),
    )  # fmt: skip
    return out, where


def _pool(
    inputs: torch.Size, outputs: torch.Size, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int],
) -> Pool:  # fmt: skip
    """The sizes for the kernels, checked: they divide by strides and store a place in a window in one byte."""
    numbers = (*inputs, *outputs[2:], *kernel, *stride, *padding, *dilation)
    if len(numbers) != len(Pool._fields_) or min(*kernel, *stride) < 1 or math.prod(kernel) > LARGEST_WINDOW:
        raise ValueError(
            f"max pooling of codes takes images and a window of 1 to {LARGEST_WINDOW} elements with strides from 1,"
            f" not {tuple(inputs)} with kernel {kernel}, stride {stride}, padding {padding} and dilation {dilation}"
        )
    return Pool(*numbers)


def _unpooled(grad: Tensor, where: Tensor, height: int, width: int, *rest: object) -> Tensor:
    return torch.empty((*where.shape[:2], height, width), dtype=grad.dtype, memory_format=formulas.layout_of(where))


@operator(_unpooled, formulas.max_pool_codes_backward)
def max_pool_codes_backward(
    grad: Tensor, where: Tensor, height: int, width: int, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int],
) -> Tensor:  # fmt: skip
    """The gradient of the pooled images, whose size is height x width."""
    grad, grad_in = like(grad, where), _unpooled(grad, where, height, width)
    pool = _pool(grad_in.shape, where.shape, kernel, stride, padding, dilation)
    nearest = int(not where.is_contiguous())
    compiled().max_pool_backward(
        elements_at("grad", grad, where), elements_at("places", where, where, torch.uint8),
        elements_at("grad_in", grad_in, grad_in), pool, nearest, threads_for(grad_in.numel()),
    )  # fmt: skip
    return grad_in
