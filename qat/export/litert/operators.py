"""Quantization as torch operators: what torch.export records when it traces frozen modules with these operations."""

from typing import Any

import torch
from torch import Tensor

from qat.integers.frozen import Operations


@torch.library.custom_op("qat::litert_quantize", mutates_args=())
def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: Tensor | None, high: Tensor | None, name: str
) -> Tensor:
    """`Operations.quantize`, with the quantizer's name."""
    return Operations().quantize(x, scale, zero_point, None if low is None or high is None else (low, high), name)


@torch.library.custom_op("qat::litert_dequantize", mutates_args=())
def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None, layer: str | None = None
) -> Tensor:
    """`Operations.dequantize`, with the layer's name."""
    return Operations().dequantize(codes, scale, zero_point, axis, layer)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, low: Any, high: Any, name: str) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@dequantize.register_fake
def _(codes: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(codes, dtype=torch.float32)


class LiteRTOperations(Operations):
    """The two operators."""

    def quantize(self, x: Tensor, scale: Tensor, zero_point: Tensor, bounds: Any, quantizer: str) -> Tensor:
        """`quantize`."""
        return quantize(x, scale, zero_point, *(bounds or (None, None)), quantizer)  # type: ignore[no-any-return]

    dequantize = staticmethod(dequantize)
