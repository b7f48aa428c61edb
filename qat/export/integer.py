"""Modules that hold a prepared model's integers and spell them as ONNX quantization operators.

They exist only between `prepare`d modules and the ONNX file: torch.onnx exports them, nothing runs them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.layers import QuantConv2d, QuantLayer, QuantLinear
from qat.quantizer import Quantizer

MOST_BITS = 8
"""ONNX Runtime's integer kernels take no wider operands."""

OPSET = 21
"""The first opset with 4- and 16-bit integers in QuantizeLinear."""


def onnx_operator(
    name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Sequence[int], axis: int | None = None
) -> Tensor:
    """One ONNX operator in the graph under export."""
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    result: Tensor = torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=shape, version=OPSET)
    return result


class ActivationGrid(nn.Module):
    """A quantizer as QuantizeLinear -> DequantizeLinear, with an integer Clip between for fewer than 8 bits.

    The Clip acts on integers, so a convolution before it still becomes QLinearConv.
    """

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        scale, zero_point = quantizer.grid()
        low, high = quantizer.bounds()
        self.container = torch.int8 if low < 0 else torch.uint8
        limits = torch.iinfo(self.container)
        self.clips = (low, high) != (limits.min, limits.max)
        self.scale: Tensor
        self.zero_point: Tensor
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("scale", scale.detach().float())
        self.register_buffer("zero_point", zero_point.detach().to(self.container))
        self.register_buffer("low", torch.tensor(low, dtype=self.container))
        self.register_buffer("high", torch.tensor(high, dtype=self.container))

    def forward(self, x: Tensor) -> Tensor:
        """The operators."""
        q = onnx_operator("QuantizeLinear", (x, self.scale, self.zero_point), self.container, x.shape)
        if self.clips:
            q = onnx_operator("Clip", (q, self.low, self.high), self.container, x.shape)
        return onnx_operator("DequantizeLinear", (q, self.scale, self.zero_point), torch.float32, x.shape)


class IntegerLayer(nn.Module):
    """A quantized layer, its BatchNorm folded in, with int8 weight and int32 bias behind DequantizeLinear."""

    def __init__(self, layer: QuantLayer, grid: Quantizer, norm: nn.Module | None) -> None:
        super().__init__()
        integers = layer.integers(grid, norm)
        lowest, highest = integers.codes.min().item(), integers.codes.max().item()
        if not (lowest >= -128 and highest <= 127 and integers.bias_codes.isfinite().all()):
            raise ValueError(
                f"export_onnx: a {type(layer).__name__}'s integers go from {lowest:g} to {highest:g}, not in int8"
                " (NaN weights? a grid that is unsigned or not narrow_range=True?)"
            )
        self.geometry = layer
        self.weight: Tensor
        self.weight_scale: Tensor
        self.weight_zero_point: Tensor
        self.bias: Tensor
        self.bias_scale: Tensor
        self.register_buffer("weight", integers.codes.detach().to(torch.int8))
        self.register_buffer("weight_scale", integers.scale.detach().float().contiguous())
        # Written out because ONNX Runtime fuses QGemm only if the weight's zero point is there.
        self.register_buffer("weight_zero_point", torch.zeros(self.weight_scale.shape, dtype=torch.int8))
        self.register_buffer("bias", integers.bias_codes.detach().to(torch.int32))
        self.register_buffer("bias_scale", integers.accumulator_scale.detach().float().contiguous())

    def forward(self, x: Tensor, grid: nn.Module | None = None, norm: nn.Module | None = None) -> Tensor:
        """DequantizeLinear of weight and bias, then the float operation that the runtime fuses into an integer one."""
        weight = onnx_operator(
            "DequantizeLinear", (self.weight, self.weight_scale, self.weight_zero_point), torch.float32,
            self.weight.shape, axis=0,
        )  # fmt: skip
        bias = onnx_operator("DequantizeLinear", (self.bias, self.bias_scale), torch.float32, self.bias.shape, axis=0)
        if isinstance(self.geometry, QuantConv2d):
            return self.geometry.operate(x, weight, bias)
        assert isinstance(self.geometry, QuantLinear)
        return F.linear(x, weight, bias)


class GlobalAveragePool(nn.Module):
    """AdaptiveAvgPool2d(1) as ONNX GlobalAveragePool; torch.onnx writes a ReduceMean, which has no integer kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, 1, 1)."""
        return onnx_operator("GlobalAveragePool", (x,), torch.float32, (x.shape[0], x.shape[1], 1, 1))
