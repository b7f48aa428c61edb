"""QuantConv1d, QuantConv2d, QuantConv3d: convolutions on integer grids."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from qat.layers.base import QuantLayer
from qat.layers.sharing import ActivationSpec
from qat.layers.twins import register_twin
from qat.spec import QuantSpec


class QuantConvolution(QuantLayer):
    """Base of the three convolutions; the other base is torch's layer, whose constructor this one calls.

    y = conv(quantize(x), quantize(weight)) + bias, both quantizers with a learned scale. Evaluation
    computes the same as the deployed integers do, with the bias rounded to int32 at scale_x * scale_weight. Padding
    adds the value 0.0 or copies of x, which lie on the grid of x.

    Args:
        in_channels ... dtype: as in torch's layer, in the same order.
        weight_spec: grid of the weight; what it leaves open: 8 bits, symmetric, narrow, per output channel.
        activation_spec: grid of the input; what it leaves open, and "default": 8 bits unsigned with a zero point;
            None: the input is quantized elsewhere. Before the first use call `qat.calibrate(layer, batches)`.
    """

    argument_names = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode",
    )  # fmt: skip

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype,
        )  # fmt: skip
        self.add_quantizers(weight_spec, activation_spec)

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """torch's own convolution, padding modes included."""
        layer: Any = self
        y: Tensor = layer._conv_forward(x, weight, bias)
        return y


@register_twin(nn.Conv1d)
class QuantConv1d(QuantConvolution, nn.Conv1d):
    """`torch.nn.Conv1d` with quantized weight and input; see `QuantConvolution` for its arguments.

    Shapes: input (N, in_channels, L) or (in_channels, L), output (N, out_channels, L') or (out_channels, L').

    >>> layer = QuantConv1d(3, 8, 5, padding="same", padding_mode="circular", activation_spec=None)
    >>> layer(torch.randn(2, 3, 20)).shape
    torch.Size([2, 8, 20])
    >>> layer.weight_quantizer.scale.shape
    torch.Size([8, 1, 1])
    """


@register_twin(nn.Conv2d)
class QuantConv2d(QuantConvolution, nn.Conv2d):
    """`torch.nn.Conv2d` with quantized weight and input; see `QuantConvolution` for its arguments.

    Shapes: input (N, in_channels, H, W), output (N, out_channels, H', W'), N absent in both or in neither.

    >>> layer = QuantConv2d(3, 8, 3, padding=1, activation_spec=None)
    >>> layer(torch.randn(2, 3, 6, 6)).shape
    torch.Size([2, 8, 6, 6])
    >>> layer.weight_quantizer.scale.shape
    torch.Size([8, 1, 1, 1])
    """


@register_twin(nn.Conv3d)
class QuantConv3d(QuantConvolution, nn.Conv3d):
    """`torch.nn.Conv3d` with quantized weight and input; see `QuantConvolution` for its arguments.

    Shapes: input (N, in_channels, D, H, W), output (N, out_channels, D', H', W'), N absent in both or in neither.

    >>> layer = QuantConv3d(3, 4, (1, 3, 3), stride=(1, 2, 2), activation_spec=None)
    >>> layer(torch.randn(2, 3, 4, 7, 7)).shape
    torch.Size([2, 4, 4, 3, 3])
    >>> layer.weight_quantizer.scale.shape
    torch.Size([4, 1, 1, 1, 1])
    """
