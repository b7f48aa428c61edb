"""The one place that gives addresses to the C code.

A kernel trusts its arguments: it reads and writes the number, type and order of elements that they promise, whatever
lies there. So only tensors that are what it expects get an address. No other file asks a tensor for its `data_ptr`; a
test reads them all.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

NEAREST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats with channels innermost, by the number of axes."""


def is_dense(x: Tensor) -> bool:
    """Return True if the elements lie next to each other, in any order of the axes."""
    if x.is_contiguous():
        return True
    nearest = NEAREST.get(x.dim())
    if nearest is not None and x.is_contiguous(memory_format=nearest):
        return True
    return x.stride() == torch.empty_like(x, device="meta").stride()


def numbers_at(what: str, x: Tensor, count: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the address of `count` consecutive numbers; the error names them `what`."""
    found: int  # 0 if the memory was given back
    if x.numel() == count and x.dtype is dtype and x.is_cpu and x.is_contiguous() and (found := x.data_ptr()):
        return found
    raise ValueError(
        f"{what} should be {count} numbers of {dtype} on the CPU, one after the other in memory, not {_described(x)}"
    )


def elements_at(what: str, x: Tensor, pattern: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Return the address of a tensor's elements, in the memory order of `pattern`.

    The pattern has x's shape and strides, dense in any memory format; it is x itself if there is no other.
    """
    found: int
    if x.dtype is dtype and x.is_cpu and _alike(x, pattern) and (found := x.data_ptr()):
        return found
    raise ValueError(
        f"{what} should be {tuple(pattern.shape)} of {dtype} on the CPU, without gaps in memory and with strides"
        f" {pattern.stride()}, not {_described(x)}"
    )


def empty_at(pattern: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return a new tensor in the memory order of a pattern, and its address."""
    x = torch.empty_like(pattern, dtype=dtype)
    return x, x.data_ptr()


def rows_at(what: str, x: Tensor, rows: int) -> int:
    """Return the address of a float32 tensor whose first axis is `rows` equal pieces."""
    if rows == 1 or (x.dim() and x.shape[0] == rows and x.stride(0) * rows == x.numel()):
        return elements_at(what, x, x)
    raise ValueError(f"{what} should be {rows} rows, one after the other in memory, not {_described(x)}")


def places_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return where tensors lie now, to notice that one was given other memory."""
    return [*map(Tensor.data_ptr, tensors)]


def _alike(x: Tensor, pattern: Tensor) -> bool:
    if x is pattern:
        return is_dense(x)
    if x.is_contiguous() and pattern.is_contiguous():
        return x.numel() == pattern.numel()
    return x.shape == pattern.shape and x.stride() == pattern.stride() and is_dense(x)


def _described(x: Tensor) -> str:
    held = "" if x.device.type == "meta" or x.data_ptr() or not x.numel() else ", its memory given back"
    return f"{tuple(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}{held}"
