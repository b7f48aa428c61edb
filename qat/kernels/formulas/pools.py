"""Formulas for max pooling of codes, (N, C, H, W); see `qat.kernels.operators.pools`.

Both loop over the places in a window; each place is a strided slice of the whole tensor. So they need no indices of
eight bytes, and no two windows write to one element at once: the gradient's sums have one order on every device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

OUTSIDE = -1
"""The padding of an image of codes: less than every code."""


def max_pool_codes(codes: Tensor, window: list[int]) -> tuple[Tensor, Tensor]:
    """The largest code of every window and its place in the window, the first of several equal ones.

    A window that lies in the padding entirely, as a dilated one can, gets some code and no gradient.
    """
    sizes = pooled_sizes(codes, window)
    padded = F.pad(codes.to(torch.int16), _pads(list(codes.shape[2:]), sizes, window), "constant", OUTSIDE)
    largest = _slice(padded, 0, sizes, window)
    where = torch.zeros_like(largest, dtype=torch.uint8)
    for k in range(1, window[0] * window[1]):
        each = _slice(padded, k, sizes, window)
        where.masked_fill_(each > largest, k)
        largest = torch.maximum(largest, each)
    layout = layout_of(codes)
    out = torch.empty(largest.shape, dtype=torch.uint8, device=codes.device, memory_format=layout)
    return out.copy_(largest), torch.empty_like(out).copy_(where)


def max_pool_codes_backward(grad: Tensor, where: Tensor, height: int, width: int, window: list[int]) -> Tensor:
    """The gradient of the pooled images (height x width): every window gives its own to its largest element."""
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
    """Height and width after pooling."""
    kernel, stride, padding, dilation = _pairs(window)
    axes = zip(images.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [pooled_size(*each, bool(window[8])) for each in axes]


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Length of an axis after pooling, as in torch: with ceil_mode no window begins in the padding at the end."""
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    windows = (reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def _pairs(window: list[int]) -> list[list[int]]:
    """Kernel, stride, padding and dilation."""
    return [window[k : k + 2] for k in (0, 2, 4, 6)]


def _pads(images: list[int], sizes: list[int], window: list[int]) -> list[int]:
    """The padding left, right, above and below that makes every window lie inside."""
    behind = [
        max((windows - 1) * step + (length - 1) * spread + 1 - size - pad, 0)
        for size, windows, length, step, pad, spread in zip(images, sizes, *_pairs(window), strict=True)
    ]
    return [window[5], behind[1], window[4], behind[0]]


def _slice(padded: Tensor, k: int, sizes: list[int], window: list[int]) -> Tensor:
    """A view of element k of all windows."""
    kernel, stride, _, dilation = _pairs(window)
    y, x = k // kernel[1] * dilation[0], k % kernel[1] * dilation[1]
    rows = slice(y, y + (sizes[0] - 1) * stride[0] + 1, stride[0])
    return padded[:, :, rows, x : x + (sizes[1] - 1) * stride[1] + 1 : stride[1]]


def layout_of(x: Tensor) -> torch.memory_format:
    """The memory format of images."""
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last
