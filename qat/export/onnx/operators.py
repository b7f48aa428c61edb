"""Quantization as ONNX operators, which torch.onnx records in frozen modules."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat.integers.frozen import Operations

OPSET = 21
"""The first opset with containers of 4 bits, and with 16-bit integers in QuantizeLinear."""

OPSETS = range(13, 26)
"""Opsets with a scale for each channel that ONNX Runtime 1.31 computes in integers."""

TRACED = 18
"""The first opset that torch.onnx writes; older ones are made of it."""

QUANTIZER = "qat.quantizer"
"""Metadata key of a QuantizeLinear during the export: the name of its quantizer."""

LAYER = "qat.layer"
"""Metadata key of a weight's DequantizeLinear during the export: the name of its layer."""


class OnnxOperations(Operations):
    """QuantizeLinear and DequantizeLinear; for fewer than 8 bits a Clip between them.

    The Clip acts on integers, so a convolution before it still becomes QLinearConv.

    Args:
        opset: the version of ONNX's operators.
        float_biases, as_trained: as in `Operations`.
    """

    def __init__(self, opset: int = OPSET, float_biases: bool = False, as_trained: bool = False) -> None:
        self.opset, self.written = max(opset, TRACED), opset
        self.float_biases, self.as_trained = float_biases, as_trained

    def quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[Tensor, Tensor] | None, quantizer: str
    ) -> Tensor:
        """Record QuantizeLinear, then Clip if there are bounds."""
        name = {QUANTIZER: quantizer}
        codes = _operator(
            "QuantizeLinear", (x, scale, zero_point), zero_point.dtype, x.shape, self.opset, metadata=name
        )
        return codes if bounds is None else _operator("Clip", (codes, *bounds), zero_point.dtype, x.shape, self.opset)

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None, layer: str | None = None
    ) -> Tensor:
        """Record DequantizeLinear."""
        inputs = (codes, scale) if zero_point is None else (codes, scale, zero_point)
        name = None if layer is None else {LAYER: layer}
        return _operator("DequantizeLinear", inputs, torch.float32, codes.shape, self.opset, axis, name)


class GlobalAveragePool(nn.Module):
    """AdaptiveAvgPool2d(1) as GlobalAveragePool; a ReduceMean has no integer kernel."""

    def __init__(self, opset: int, flat: bool) -> None:
        super().__init__()
        self.opset, self.flat = opset, flat

    def forward(self, x: Tensor) -> Tensor:
        """Average (N, C, H, W) to (N, C, 1, 1), or to (N, C) if `flat`."""
        y = _operator("GlobalAveragePool", (x,), torch.float32, (x.shape[0], x.shape[1], 1, 1), self.opset)
        return y.flatten(1) if self.flat else y


def _operator(
    name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Sequence[int], opset: int,
    axis: int | None = None, metadata: dict[str, str] | None = None,
) -> Tensor:  # fmt: skip
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    return torch.onnx.ops.symbolic(
        name, inputs, attributes, dtype=dtype, shape=shape, version=opset, metadata_props=metadata
    )
