"""QuantLinear: matrix products on integer grids."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.layers.base import QuantLayer
from qat.layers.twins import ActivationSpec, register_twin
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
