"""Modules that hold the 8-bit integers of a quantizer, parameter, layer or table.

They compute with `Operations`: in torch, or as the operators of the file that is written from them.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qat.layers import IntegerWeight, QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d, QuantLayer
from qat.layers.embedding import IntegerTable
from qat.quantizer import Quantizer

CONTAINER_BITS = 8
"""Bits that store one integer; integer kernels take no wider operands."""

TRAINED_BITS = 16
"""Bits of the widest grid, where no kernel computes: `Operations.as_trained`."""

TRANSPOSED = (QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d)


class Operations:
    """Arithmetic of frozen modules, here torch's.

    A file format derives from this class and answers with its own operators, so that tracing a frozen model records
    them.
    """

    float_biases = False
    """True if biases are stored as the floats that they stand for."""

    as_trained = False
    """True if integers keep the trained grid, also one of more than 8 bits; else they are those of kernels."""

    sums_integers = False
    """True if layers compute as evaluation does, not on dequantized operands."""  # which runtimes fuse

    def quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[Tensor, Tensor] | None, quantizer: str
    ) -> Tensor:
        """Return clamp(round(x / scale) + zero_point, *bounds) in the type of zero_point.

        Args:
            x: any shape.
            scale: shape (), > 0.
            zero_point: shape (), an integer within the bounds; its dtype is that of the result.
            bounds: lowest and highest integer, of the same dtype; None for those of the dtype.
            quantizer: the name of the call in the model, which a file keeps.
        """
        limits = torch.iinfo(zero_point.dtype)
        low, high = (limits.min, limits.max) if bounds is None else map(int, bounds)
        return ((x / scale).round() + zero_point).clamp(low, high).to(zero_point.dtype)

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None, layer: str | None = None
    ) -> Tensor:
        """Return (codes - zero_point) * scale.

        Args:
            codes: integers in any shape.
            scale: shape (), or one along `axis`.
            zero_point: in the shape of scale and the type of codes; None for 0.
            axis: of codes, where there are several scales; None for one scale.
            layer: the name of the layer whose weight this is, which a file keeps.
        """
        trailing = [] if axis is None else [-1, *[1] * (codes.dim() - 1 - axis)]
        shifted = codes.float() if zero_point is None else codes.float() - zero_point.float().reshape(trailing)
        return shifted * scale.reshape(trailing)


class FreezingError(ValueError):
    """A layer whose integers cannot be stored."""


class NotANumberError(ValueError):
    """A value for a quantizer was NaN, which no code stands for."""

    def __init__(self, quantizer: str) -> None:
        super().__init__(f"the input of {quantizer!r} contains NaN, which has no integer code")


def stored_offset(quantizer: Quantizer) -> int:
    """Return what storing adds to integers: 128 for a signed grid with a zero point.

    The same grid is then stored in uint8, the type for which runtimes have every kernel; ONNX Runtime loses a zero
    point in int8 when it fuses. A symmetric signed grid stays int8 with zero point 0, which TensorRT requires.
    """
    return 128 if quantizer.bounds()[0] < 0 and not quantizer.spec.symmetric else 0


def stored_qparams(quantizer: Quantizer, operations: Operations) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scale, and zero point and bounds in the integer type that stores the codes."""
    scale, zero_point = quantizer.grid()
    offset = 0 if operations.as_trained else stored_offset(quantizer)
    low, high = (bound + offset for bound in quantizer.bounds())
    kinds = (torch.int8, torch.int16) if low < 0 else (torch.uint8, torch.uint16)
    kind = kinds[high - low >= 2**CONTAINER_BITS]
    first, last = torch.tensor(low, dtype=kind), torch.tensor(high, dtype=kind)
    return scale.detach().float(), (zero_point.detach() + offset).to(kind), first, last


class IntegerGrid(NamedTuple):
    """Integers qmin .. qmax, of which q stands for (q - zero_point) * scale."""

    scale: float
    zero_point: int
    qmin: int
    qmax: int

    def code(self, value: float) -> int:
        """Return the integer of a value, which may be infinite."""
        code = np.rint(np.float32(value) / np.float32(self.scale)) + self.zero_point
        return int(min(max(code, self.qmin), self.qmax))


class FrozenQuantizer(nn.Module):
    """A quantizer of activations on a fixed grid; `name` is the call's in the model."""

    def __init__(self, quantizer: Quantizer, name: str, operations: Operations) -> None:
        super().__init__()
        self.quantizer_name = name
        self.operations = operations
        self.scale, self.zero_point, self.low, self.high = map(nn.Buffer, stored_qparams(quantizer, operations))
        limits = torch.iinfo(self.low.dtype)
        self.clips = (int(self.low), int(self.high)) != (limits.min, limits.max)  # else the type clips by itself

    def grid(self) -> IntegerGrid:
        """Return scale, zero point and bounds: equal numbers are one grid."""
        return IntegerGrid(float(self.scale), int(self.zero_point), int(self.low), int(self.high))

    def forward(self, x: Tensor) -> Tensor:
        """Return x on the grid."""
        bounds = (self.low, self.high) if self.clips else None
        codes = self.operations.quantize(x, self.scale, self.zero_point, bounds, self.quantizer_name)
        return self.operations.dequantize(codes, self.scale, self.zero_point)


class FrozenParameter(nn.Module):
    """A quantized parameter in a matrix product, as integers, named by its quantizer."""

    def __init__(self, quantizer: Quantizer, name: str, value: Tensor, operations: Operations) -> None:
        super().__init__()
        self.quantizer_name = name
        self.operations = operations
        scale, zero_point, *bounds = stored_qparams(quantizer, operations)
        self.low, self.high = map(int, bounds)
        codes = quantizer.codes(value).detach() + (self.low - quantizer.bounds()[0])
        self.codes, self.scale, self.zero_point = map(nn.Buffer, (codes.to(zero_point.dtype), scale, zero_point))

    def forward(self, *unused: object) -> Tensor:
        """Return the values; the float parameter is not read again."""
        return self.operations.dequantize(self.codes, self.scale, self.zero_point)


class FrozenLayer(nn.Module):
    """A quantized layer with its BatchNorm folded in: int8 weight, int32 bias.

    Args:
        layer: whose operation it is.
        name: of the layer in the model.
        integers: weight and bias.
        quantizer: of the input, if it is known.
        operations: how to compute.
        grid: the same, frozen, if the input is not quantized outside.

    Raises:
        FreezingError: if the weight's integers do not fit int8.
    """

    def __init__(
        self,
        layer: QuantLayer,
        name: str,
        integers: IntegerWeight,
        quantizer: Quantizer | None,
        operations: Operations,
        grid: FrozenQuantizer | None = None,
    ) -> None:
        super().__init__()
        lowest, highest = integers.codes.min().item(), integers.codes.max().item()
        for what, found in (("weight", integers.codes), ("bias", integers.bias_codes)):
            if not found.isfinite().all():
                raise FreezingError(f"{name!r}: its {what}, BatchNorm folded in, holds NaN or infinity")
        wide = operations.as_trained and layer.weight_quantizer.spec.bits > CONTAINER_BITS
        kind = torch.iinfo(torch.int16 if wide else torch.int8)
        if lowest < kind.min or highest > kind.max:
            raise FreezingError(
                f"{name!r}: the integers of its weight range from {lowest:g} to {highest:g}, outside {kind.dtype}"
                " (a grid that is unsigned or not narrow_range=True?)"
            )
        self.layer_name = name
        self.input_qparams = None if quantizer is None else stored_qparams(quantizer, operations)[:2]
        self.operations = operations
        self.twin = layer
        self.grid = grid
        # A transposed convolution has its output channels on axis 1; with groups, one axis does not hold them all.
        self.in_torch_layout = isinstance(layer, TRANSPOSED) and layer.groups == 1
        codes = layer.torch_layout(integers.codes) if self.in_torch_layout else integers.codes
        self.weight = nn.Buffer(codes.detach().to(getattr(torch, kind.dtype)).contiguous())
        self.weight_scale = nn.Buffer(integers.scale.detach().float().contiguous())
        # Always 0, and stored anyway: ONNX Runtime fuses a linear layer only if the weight has a zero point.
        self.weight_zero_point = nn.Buffer(torch.zeros(self.weight_scale.shape, dtype=self.weight.dtype))
        bias = integers.bias_codes.detach().to(torch.int32)
        self.bias_scale = nn.Buffer(integers.accumulator_scale.detach().float().contiguous())
        self.bias = nn.Buffer(bias * self.bias_scale if operations.float_biases else bias)

    def forward(self, x: Tensor, *_: Tensor, **options: Any) -> Tensor:
        """Compute on dequantized operands, or on integers.

        Args:
            x: the input. A weight and a bias given behind it are ignored.
            options: further arguments of the operation, such as `output_size`.
        """
        if self.grid is not None:
            x = self.grid(x)
        if self.operations.sums_integers:
            codes = self.twin.channels_first(self.weight) if self.in_torch_layout else self.weight
            integers = IntegerWeight(codes, self.weight_scale, self.bias, self.bias_scale)
            assert self.input_qparams is not None
            return self.twin.integer_forward(x, integers, self.input_qparams[0], **options)
        weight = self.operations.dequantize(
            self.weight, self.weight_scale, self.weight_zero_point, int(self.in_torch_layout), self.layer_name
        )
        if not self.in_torch_layout:
            weight = self.twin.torch_layout(weight)
        bias: Tensor = self.bias
        if not self.operations.float_biases:
            bias = self.operations.dequantize(bias, self.bias_scale, None, axis=0)
        result: Tensor = self.twin.operate(x, weight, bias, **options)
        return result


class FrozenTable(nn.Module):
    """The rows of a quantized embedding: 8-bit codes, and a scale for each row."""

    def __init__(self, table: IntegerTable, operations: Operations) -> None:
        super().__init__()
        self.operations = operations
        rows = table.codes.shape[0]
        container = torch.int8 if bool(table.codes.min() < 0) else torch.uint8
        self.codes = nn.Buffer(table.codes.detach().to(container))
        self.scale = nn.Buffer(table.scale.detach().float().reshape(-1).expand(rows).contiguous())
        zero_point = torch.as_tensor(table.zero_point).detach().to(container)
        self.zero_point = nn.Buffer(zero_point.reshape(-1).expand(rows).contiguous())

    def forward(self, indices: Tensor) -> Tensor:
        """Return the values of the rows with these indices."""
        asked = indices.reshape(-1)
        rows = self.operations.dequantize(self.codes[asked], self.scale[asked], self.zero_point[asked], axis=0)
        return rows.reshape(*indices.shape, -1)


@torch.no_grad()
def rounds_half_to_even(quantizer: Quantizer) -> bool:
    """True if codes(x) = clamp(round(x / scale) + zero_point), halves to even.

    So every runtime computes an activation's integers from scale and zero point; a weight's are stored.
    """
    if quantizer.role == "weight":
        return True
    scale, zero_point = quantizer.grid()
    low, high = quantizer.bounds()
    x = (torch.arange(low, high, device=scale.device) + 0.5 - zero_point) * scale
    return torch.equal(quantizer.codes(x), torch.clamp(torch.round(x / scale) + zero_point, low, high))
