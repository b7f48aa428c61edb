"""Max pooling of codes, (N, C, H, W), contiguous or channels_last.

A byte an element is kept for the backward. The formulas loop over the places in a window; each place is a strided slice
of the whole tensor. So no two windows write to one element at once: the gradient's sums have one order.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.codes.operators.codes import Codes, Context, carrier_for, first_derivative
from qat.codes.operators.operator import operator
from qat.codes.operators.quantize import decode, with_scale_gradient
from qat.integers.movement import Window
from qat.kernels.cpu.addresses import elements_at
from qat.kernels.cpu.quantizers import compiled, in_layout_of, threads_for
from qat.kernels.cpu.structures import Pool

OUTSIDE = -1
"""Padding of an image of codes: less than every code."""


def _max_pool_codes(codes: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
    sizes = pooled_sizes(codes, window)
    padded = F.pad(codes.to(torch.int16), _pads(list(codes.shape[2:]), sizes, window), "constant", OUTSIDE)
    largest = _slice(padded, 0, sizes, window)
    where = torch.zeros_like(largest, dtype=torch.uint8)  # a later place only wins if it is larger
    for k in range(1, window[0] * window[1]):
        each = _slice(padded, k, sizes, window)
        where.masked_fill_(each > largest, k)
        largest = torch.maximum(largest, each)
    layout = layout_of(codes)
    out = torch.empty(largest.shape, dtype=torch.uint8, device=codes.device, memory_format=layout)
    return out.copy_(largest), torch.empty_like(out).copy_(where)


def _max_pool_codes_backward(grad: Tensor, where: Tensor, height: int, width: int, window: list[int]) -> Tensor:
    sizes = list(where.shape[2:])
    left, right, above, below = _pads([height, width], sizes, window)
    layout = layout_of(where)
    shape = (*where.shape[:2], above + height + below, left + width + right)
    padded = torch.zeros(shape, dtype=grad.dtype, device=grad.device)
    for k in range(window[0] * window[1]):
        _slice(padded, k, sizes, window).add_(torch.where(where == k, grad, 0.0))
    image = padded[:, :, above : above + height, left : left + width]
    return torch.empty(image.shape, dtype=grad.dtype, device=grad.device, memory_format=layout).copy_(image)


def pooled_sizes(images: Tensor, window: list[int]) -> list[int]:
    """Return height and width after pooling."""
    kernel, stride, padding, dilation = _pairs(window)
    axes = zip(images.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [pooled_size(*each, bool(window[8])) for each in axes]


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return the length of an axis after pooling, as in torch."""
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    # With ceil_mode no window begins in the padding at the end.
    windows = (reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def _pairs(window: list[int]) -> list[list[int]]:
    return [window[k : k + 2] for k in (0, 2, 4, 6)]


def _pads(images: list[int], sizes: list[int], window: list[int]) -> list[int]:
    behind = [
        max((windows - 1) * step + (length - 1) * spread + 1 - size - pad, 0)
        for size, windows, length, step, pad, spread in zip(images, sizes, *_pairs(window), strict=True)
    ]
    return [window[5], behind[1], window[4], behind[0]]


def _slice(padded: Tensor, k: int, sizes: list[int], window: list[int]) -> Tensor:
    kernel, stride, _, dilation = _pairs(window)
    y, x = k // kernel[1] * dilation[0], k % kernel[1] * dilation[1]
    rows = slice(y, y + (sizes[0] - 1) * stride[0] + 1, stride[0])
    return padded[:, :, rows, x : x + (sizes[1] - 1) * stride[1] + 1 : stride[1]]


def layout_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of images."""
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


LARGEST_WINDOW = 256
"""Most elements of a window: the place of the largest one is stored in one byte."""


@operator(_max_pool_codes)
def max_pool_codes(codes: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
    """Return the largest code of every window and its first place in the window."""
    codes, sizes = codes.contiguous(memory_format=layout_of(codes)), pooled_sizes(codes, window)
    out = torch.empty((*codes.shape[:2], *sizes), dtype=torch.uint8, memory_format=layout_of(codes))
    where, nearest = torch.empty_like(out), int(not codes.is_contiguous())
    compiled().max_pool(
        elements_at("codes", codes, codes, torch.uint8), elements_at("maxima", out, out, torch.uint8),
        elements_at("places", where, out, torch.uint8), _pool(codes.shape, out.shape, window), nearest,
        threads_for(codes.numel()),
    )  # fmt: skip
    return out, where


@operator(_max_pool_codes_backward)
def max_pool_codes_backward(grad: Tensor, where: Tensor, height: int, width: int, window: list[int]) -> Tensor:
    """Return the gradient of images: each window's goes to its largest element."""
    shape, layout = (*where.shape[:2], height, width), layout_of(where)
    grad, grad_in = in_layout_of(grad, where), torch.empty(shape, dtype=grad.dtype, memory_format=layout)
    compiled().max_pool_backward(
        elements_at("grad", grad, where), elements_at("places", where, where, torch.uint8),
        elements_at("grad_in", grad_in, grad_in), _pool(grad_in.shape, where.shape, window),
        int(not where.is_contiguous()), threads_for(grad_in.numel()),
    )  # fmt: skip
    return grad_in


def _pool(inputs: torch.Size, outputs: torch.Size, window: list[int]) -> Pool:
    # The kernels divide by strides and store a place in a window in one byte, so both are checked.
    numbers = (*inputs, *outputs[2:], *window[:8])
    if len(numbers) != len(Pool._fields_) or min(window[:4]) < 1 or math.prod(window[:2]) > LARGEST_WINDOW:
        raise ValueError(
            f"max pooling of codes takes images and a window of 1 to {LARGEST_WINDOW} elements with strides from 1,"
            f" not {tuple(inputs)} with kernel, stride, padding and dilation {window[:8]}"
        )
    return Pool(*numbers)


class MaxPoolFunction(torch.autograd.Function):
    """Max pooling of codes; a byte a window says where its gradient goes."""

    @staticmethod
    def forward(ctx: Context, carrier: Tensor, codes: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        out, where = max_pool_codes(codes, window.packed())
        ctx.height, ctx.width = codes.shape[2:]
        ctx.window = window
        ctx.save_for_backward(where)
        ctx.mark_non_differentiable(out)
        ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they
        return carrier_for(out, carrier), out

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (where,) = ctx.saved_tensors
        return max_pool_codes_backward(grad, where, ctx.height, ctx.width, ctx.window.packed()), None, None


def max_pool(x: Codes | Tensor, window: tuple[Any, ...], module: nn.Module | None = None) -> Codes | Tensor:
    """Return the max pooling of (N, C, H, W) by the fields of `Window`."""
    dense = isinstance(x, Codes) and (
        x.codes.is_contiguous() or (x.dim() == 4 and x.codes.is_contiguous(memory_format=torch.channels_last))
    )
    sizes = Window(*window)  # the graph holds a plain tuple
    fits = dense and x.dim() == 4 and math.prod(sizes.kernel) <= LARGEST_WINDOW
    fits = fits and not has_empty_windows(x.shape, sizes)
    if not isinstance(x, Codes) or not fits:
        y: Tensor = F.max_pool2d(decode(x), *window) if module is None else module(decode(x))
        return y
    x = with_scale_gradient(x)
    carrier, codes = MaxPoolFunction.apply(x.carrier, x.codes, sizes)
    return Codes(carrier, codes, x.qparams)


def has_empty_windows(shape: torch.Size, window: Window) -> bool:
    """Return True if a window lies in the padding alone, and has no largest code."""
    for size, kernel, stride, padding, dilation in zip(shape[2:], *window[:4], strict=True):
        if dilation > 1 and padding > 0:
            starts = range(pooled_size(size, kernel, stride, padding, dilation, window.ceil_mode))
            places = [range(k * stride - padding, k * stride - padding + kernel * dilation, dilation) for k in starts]
            if not all(any(0 <= place < size for place in each) for each in places):
                return True
    return False
