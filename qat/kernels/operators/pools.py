"""Max pooling of codes (N, C, H, W), contiguous or channels_last."""

import math

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at
from qat.kernels.cpu.quantizers import compiled, in_layout_of, threads_for
from qat.kernels.cpu.structures import Pool
from qat.kernels.formulas import pools as formulas
from qat.kernels.operators.operator import operator

LARGEST_WINDOW = 256
"""Most elements of a window, because the place of the largest one is stored in one byte."""


@operator(formulas.max_pool_codes)
def max_pool_codes(codes: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
    """The largest code of every window and its place in the window."""
    codes, sizes = codes.contiguous(memory_format=formulas.layout_of(codes)), formulas.pooled_sizes(codes, window)
    out = torch.empty((*codes.shape[:2], *sizes), dtype=torch.uint8, memory_format=formulas.layout_of(codes))
    where, nearest = torch.empty_like(out), int(not codes.is_contiguous())
    compiled().max_pool(
        elements_at("codes", codes, codes, torch.uint8), elements_at("maxima", out, out, torch.uint8),
        elements_at("places", where, out, torch.uint8), _pool(codes.shape, out.shape, window), nearest,
        threads_for(codes.numel()),
    )  # fmt: skip
    return out, where


@operator(formulas.max_pool_codes_backward)
def max_pool_codes_backward(grad: Tensor, where: Tensor, height: int, width: int, window: list[int]) -> Tensor:
    """The gradient of the pooled images, whose size is height x width."""
    shape, layout = (*where.shape[:2], height, width), formulas.layout_of(where)
    grad, grad_in = in_layout_of(grad, where), torch.empty(shape, dtype=grad.dtype, memory_format=layout)
    compiled().max_pool_backward(
        elements_at("grad", grad, where), elements_at("places", where, where, torch.uint8),
        elements_at("grad_in", grad_in, grad_in), _pool(grad_in.shape, where.shape, window),
        int(not where.is_contiguous()), threads_for(grad_in.numel()),
    )  # fmt: skip
    return grad_in


def _pool(inputs: torch.Size, outputs: torch.Size, window: list[int]) -> Pool:
    """The sizes for the kernels, checked: they divide by strides and store a place in a window in one byte."""
    numbers = (*inputs, *outputs[2:], *window[:8])
    if len(numbers) != len(Pool._fields_) or min(window[:4]) < 1 or math.prod(window[:2]) > LARGEST_WINDOW:
        raise ValueError(
            f"max pooling of codes takes images and a window of 1 to {LARGEST_WINDOW} elements with strides from 1,"
            f" not {tuple(inputs)} with kernel, stride, padding and dilation {window[:8]}"
        )
    return Pool(*numbers)
