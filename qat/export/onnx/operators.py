"""Modules that hold a prepared model's integers and spell them as ONNX quantization operators.

They exist only between `prepare`d modules and the ONNX file: torch.onnx exports them, nothing runs them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat.layers import IntegerWeight, QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d, QuantLayer
from qat.layers.embedding import IntegerTable
from qat.quantizer import Quantizer

MOST_BITS = 8
"""ONNX Runtime's integer kernels take no wider operands."""

OPSET = 21
"""The first opset with 4- and 16-bit integers in QuantizeLinear."""

QUANTIZER = "qat.quantizer"
"""Key of a QuantizeLinear's metadata while it is exported: the quantizer that it comes from."""

LAYER = "qat.layer"
"""Key of a weight's DequantizeLinear's metadata while it is exported: the layer that it belongs to."""

TRANSPOSED = (QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d)


def onnx_operator(
    name: str,
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype,
    shape: Sequence[int],
    axis: int | None = None,
    metadata: dict[str, str] | None = None,
) -> Tensor:
    """One ONNX operator in the graph under export."""
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    result: Tensor = torch.onnx.ops.symbolic(
        name, inputs, attributes, dtype=dtype, shape=shape, version=OPSET, metadata_props=metadata
    )
    return result


def written_offset(quantizer: Quantizer) -> int:
    """What is added to a quantizer's integers and zero point in the file: 128 for a signed grid with a zero point.

    Such a grid is the same in uint8. ONNX Runtime fuses every kernel for uint8 and loses a zero point in int8 on the
    way. A symmetric signed grid stays int8 with zero point 0, which TensorRT requires.
    """
    return 128 if quantizer.bounds()[0] < 0 and not quantizer.spec.symmetric else 0


class ActivationGrid(nn.Module):
    """A quantizer as QuantizeLinear -> DequantizeLinear, with an integer Clip between for fewer than 8 bits.

    The Clip acts on integers, so a convolution before it still becomes QLinearConv. A signed grid with a zero point is
    written in uint8: `written_offset`.
    """

    def __init__(self, quantizer: Quantizer, name: str) -> None:
        super().__init__()
        self.quantizer_name = name
        scale, zero_point = quantizer.grid()
        offset = written_offset(quantizer)
        low, high = (bound + offset for bound in quantizer.bounds())
        self.container = torch.int8 if low < 0 else torch.uint8
        limits = torch.iinfo(self.container)
        self.clips = (low, high) != (limits.min, limits.max)
        self.scale: Tensor
        self.zero_point: Tensor
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("scale", scale.detach().float())
        self.register_buffer("zero_point", (zero_point.detach() + offset).to(self.container))
        self.register_buffer("low", torch.tensor(low, dtype=self.container))
        self.register_buffer("high", torch.tensor(high, dtype=self.container))

    def numbers(self) -> tuple[float, ...]:
        """Scale, zero point and bounds: two grids with the same numbers are one."""
        return tuple(float(number) for number in (self.scale, self.zero_point, self.low, self.high))

    def forward(self, x: Tensor) -> Tensor:
        """The operators."""
        name = {QUANTIZER: self.quantizer_name}
        q = onnx_operator("QuantizeLinear", (x, self.scale, self.zero_point), self.container, x.shape, None, name)
        if self.clips:
            q = onnx_operator("Clip", (q, self.low, self.high), self.container, x.shape)
        return onnx_operator("DequantizeLinear", (q, self.scale, self.zero_point), torch.float32, x.shape)


class ConstantGrid(nn.Module):
    """A quantized parameter that is an operand of a matrix product: its integers behind a DequantizeLinear."""

    def __init__(self, quantizer: Quantizer, value: Tensor) -> None:
        super().__init__()
        scale, zero_point = quantizer.grid()
        offset = written_offset(quantizer)
        container = torch.int8 if quantizer.bounds()[0] + offset < 0 else torch.uint8
        self.codes: Tensor
        self.scale: Tensor
        self.zero_point: Tensor
        self.register_buffer("codes", (quantizer.codes(value).detach() + offset).to(container))
        self.register_buffer("scale", scale.detach().float())
        self.register_buffer("zero_point", (zero_point.detach() + offset).to(container))

    def forward(self, *unused: Any) -> Tensor:
        """The operator; what was quantized is not looked at again."""
        return onnx_operator(
            "DequantizeLinear", (self.codes, self.scale, self.zero_point), torch.float32, self.codes.shape
        )


class IntegerLayer(nn.Module):
    """A quantized layer, its BatchNorm folded in, with int8 weight and int32 bias behind DequantizeLinear.

    Args:
        layer: whose operation it is.
        name: what it is called in the model.
        integers: weight and bias.
        grids: those of the inputs, if they are quantized here and not outside.
    """

    def __init__(
        self, layer: QuantLayer, name: str, integers: IntegerWeight, grids: Sequence[ActivationGrid] = ()
    ) -> None:
        super().__init__()
        self.layer_name = name
        lowest, highest = integers.codes.min().item(), integers.codes.max().item()
        if not (lowest >= -128 and highest <= 127 and integers.bias_codes.isfinite().all()):
            raise ValueError(
                f"export_onnx: a {type(layer).__name__}'s integers go from {lowest:g} to {highest:g}, not in int8"
                " (NaN weights? a grid that is unsigned or not narrow_range=True?)"
            )
        self.geometry = layer
        self.grids = nn.ModuleList(grids)
        # A transposed convolution has its output channels on axis 1; with groups, one axis does not hold them all.
        self.in_torch_layout = isinstance(layer, TRANSPOSED) and layer.groups == 1
        codes = layer.torch_layout(integers.codes) if self.in_torch_layout else integers.codes
        self.weight: Tensor
        self.weight_scale: Tensor
        self.weight_zero_point: Tensor
        self.bias: Tensor
        self.bias_scale: Tensor
        self.register_buffer("weight", codes.detach().to(torch.int8).contiguous())
        self.register_buffer("weight_scale", integers.scale.detach().float().contiguous())
        # Written out because ONNX Runtime fuses QGemm only if the weight's zero point is there.
        self.register_buffer("weight_zero_point", torch.zeros(self.weight_scale.shape, dtype=torch.int8))
        self.register_buffer("bias", integers.bias_codes.detach().to(torch.int32))
        self.register_buffer("bias_scale", integers.accumulator_scale.detach().float().contiguous())

    def forward(self, x: Tensor, *operands: Any, **options: Any) -> Tensor:
        """DequantizeLinear of weight and bias, then the float operation that the runtime fuses into an integer one.

        Args:
            x: the input.
            operands: the second input of a bilinear layer; a weight and a bias to read are not looked at again.
            options: what the operation takes besides, as `output_size`.
        """
        others = operands if len(self.geometry.quantizer_arguments) > 1 else ()
        if self.grids:
            x, *rest = (grid(tensor) for grid, tensor in zip(self.grids, (x, *others), strict=True))
            others = tuple(rest)
        weight = onnx_operator(
            "DequantizeLinear", (self.weight, self.weight_scale, self.weight_zero_point), torch.float32,
            self.weight.shape, int(self.in_torch_layout), {LAYER: self.layer_name},
        )  # fmt: skip
        if not self.in_torch_layout:
            weight = self.geometry.torch_layout(weight)
        bias = onnx_operator("DequantizeLinear", (self.bias, self.bias_scale), torch.float32, self.bias.shape, axis=0)
        result: Tensor = self.geometry.operate(x, weight, bias, *others, **options)
        return result


class FrozenTable(nn.Module):
    """The rows of a quantized embedding: int8 codes, looked up, times their scale."""

    def __init__(self, table: IntegerTable) -> None:
        super().__init__()
        rows = table.codes.shape[0]
        self.codes: Tensor
        self.scale: Tensor
        self.zero_point: Tensor
        container = torch.int8 if bool(table.codes.min() < 0) else torch.uint8
        self.register_buffer("codes", table.codes.detach().to(container))
        self.register_buffer("scale", table.scale.detach().float().reshape(-1).expand(rows).contiguous())
        zero_point = torch.as_tensor(table.zero_point).detach().to(container)
        self.register_buffer("zero_point", zero_point.reshape(-1).expand(rows).contiguous())

    def forward(self, indices: Tensor) -> Tensor:
        """DequantizeLinear of the rows that are asked for, each with its scale."""
        asked = indices.reshape(-1)
        codes = self.codes[asked]
        rows = onnx_operator(
            "DequantizeLinear", (codes, self.scale[asked], self.zero_point[asked]), torch.float32, codes.shape, axis=0
        )
        return rows.reshape(*indices.shape, -1)


class GlobalAveragePool(nn.Module):
    """AdaptiveAvgPool2d(1) as ONNX GlobalAveragePool; torch.onnx writes a ReduceMean, which has no integer kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C, 1, 1)."""
        return onnx_operator("GlobalAveragePool", (x,), torch.float32, (x.shape[0], x.shape[1], 1, 1))
