"""QuantLinear: a matrix product on integer grids."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.layers.base import QuantLayer
from qat.layers.twins import ActivationSpec, register_twin
from qat.spec import QuantSpec


@register_twin(nn.Linear)
class QuantLinear(QuantLayer, nn.Linear):
    """`torch.nn.Linear` with quantized weight and input.

    y = quantize(x) @ quantize(weight).T + bias, both quantizers with a learned scale. Evaluation
    computes the same as the deployed integers do, with the bias rounded to int32 at scale_x * scale_weight.

    Args:
        in_features ... dtype: as in `torch.nn.Linear`, in the same order.
        weight_spec: grid of the weight; what it leaves open: 8 bits, symmetric, narrow, per output channel.
        activation_spec: grid of the input; what it leaves open, and "default": 8 bits unsigned with a zero point;
            None: the input is quantized elsewhere. Before the first use call `qat.calibrate(layer, batches)`.

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
        """torch's own linear."""
        return F.linear(x, weight, bias)
