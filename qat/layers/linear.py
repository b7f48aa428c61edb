"""QuantLinear and QuantBilinear: matrix products on integer grids."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.functional import round_ste
from qat.layers.base import QuantLayer, quantizer_or_none
from qat.layers.folding import IntegerWeight
from qat.layers.twins import ActivationSpec, register_twin
from qat.quantizer import Quantizer
from qat.spec import QuantSpec


@register_twin(nn.Linear)
class QuantLinear(QuantLayer, nn.Linear):
    """`torch.nn.Linear` with quantized weight and input.

    y = quantize(x) @ quantize(weight).T + bias; arguments as of `torch.nn.Linear`, and those of `QuantLayer`.

    Shapes: input (..., in_features), output (..., out_features).

    >>> layer = QuantLinear(16, 4, activation_spec=None)
    >>> layer(torch.randn(2, 16)).shape
    torch.Size([2, 4])
    """

    argument_names = ("in_features", "out_features")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.add_quantizers(weight_spec, activation_spec)

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


@register_twin(nn.Bilinear)
class QuantBilinear(QuantLayer, nn.Bilinear):
    """`torch.nn.Bilinear` with quantized weight and inputs.

    y[o] = sum over i, j of quantize(x1)[i] * quantize(weight)[o, i, j] * quantize(x2)[j] + bias[o], all three
    quantizers with a learned scale. Evaluation computes the same on integers, with the bias rounded to int32 at
    scale_x1 * scale_x2 * scale_weight. One product of three 8-bit integers takes up to 23 bits, so an integer kernel
    needs more than 32 bits to add 256 or more of them. Here the sum is exact up to 2^53.

    Arguments as of `torch.nn.Bilinear`, and those of `QuantLayer`; activation_spec is the grid of both inputs, each
    with a range of its own: `qat.calibrate(layer, [{"x1": ..., "x2": ...}])`.

    Shapes: inputs (..., in1_features) and (..., in2_features), output (..., out_features).

    >>> layer = QuantBilinear(4, 5, 3, activation_spec=None)
    >>> layer(torch.randn(2, 4), torch.randn(2, 5)).shape
    torch.Size([2, 3])
    """

    quantizer_arguments = ("input_quantizer", "other_quantizer")
    sum_dtype = torch.float64  # two products of three 8-bit integers can already exceed float32's 24 bits

    other_quantizer: Quantizer | None

    argument_names = ("in1_features", "in2_features", "out_features")

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
    ) -> None:
        nn.Bilinear.__init__(self, in1_features, in2_features, out_features, bias, device, dtype)
        self.add_quantizers(weight_spec, activation_spec)

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: ActivationSpec) -> None:
        super().add_quantizers(weight_spec, activation_spec)
        self.other_quantizer = quantizer_or_none(activation_spec, self.weight.device)

    def forward(  # type: ignore[override]
        self, x1: Tensor, x2: Tensor, input_quantizer: Quantizer | None = None, other_quantizer: Quantizer | None = None
    ) -> Tensor:
        """Apply the layer to x1 and x2, on the grids of these quantizers if given."""
        if self.input_quantizer is not None and self.input_quantizer is not input_quantizer:
            input_quantizer, x1 = self.input_quantizer, self.input_quantizer(x1)
        if self.other_quantizer is not None and self.other_quantizer is not other_quantizer:
            other_quantizer, x2 = self.other_quantizer, self.other_quantizer(x2)
        weight = self.weight
        if (
            self.training
            or input_quantizer is None
            or other_quantizer is None
            or not (self._runs_on_integers(input_quantizer) and self._runs_on_integers(other_quantizer))
        ):
            return self.operate(x1, self.quantized(weight), self.bias, x2)
        integers = self.integers(input_quantizer, None, weight, self.bias, other_quantizer)
        # Codes too: linear in each input, the form of the two is a sum of integers.
        other = round_ste(x2.double() / other_quantizer.grid()[0])
        return self.integer_forward(x1, integers, input_quantizer.grid()[0], other=other)

    def operate(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor
    ) -> Tensor:
        return F.bilinear(x, other, weight, bias)

    def per_channel(self, values: Tensor, weight: Tensor) -> Tensor:
        return values  # outputs are on the last axis

    def integers(
        self,
        input_quantizer: Quantizer,
        norm: nn.Module | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        other_quantizer: Quantizer | None = None,
    ) -> IntegerWeight:
        """Return `QuantLayer.integers` for two inputs; both need a quantizer."""
        if other_quantizer is None:
            raise ValueError(
                "QuantBilinear.integers: other_quantizer must be the quantizer of the second input, got None"
            )
        input_scale = input_quantizer.grid()[0].float() * other_quantizer.grid()[0].float()
        return self.folded(input_scale, norm, weight, bias)
