"""QuantConv2d: a convolution on integer grids."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from qat.layers.base import QuantLayer, default_input_spec
from qat.spec import QuantSpec


class QuantConv2d(QuantLayer, nn.Conv2d):
    """`torch.nn.Conv2d` with quantized weight and input.

    y = conv2d(quantize(x), quantize(weight)) + bias, both quantizers with a learned scale. In evaluation the same is
    computed as the deployed integers do it, the bias rounded to int32 at scale_x * scale_weight.

    Args:
        in_channels ... dtype: as of `torch.nn.Conv2d`, in the same order.
        weight_spec: grid of the weight; default: 8 bits, symmetric, per output channel.
        activation_spec: grid of the input; "default": 8 bits unsigned with a zero point; None: the input is
            quantized elsewhere. Before the first use call `qat.calibrate(layer, batches)`.

    Shapes: input (N, in_channels, H, W), output (N, out_channels, H', W'), as torch's.

    >>> layer = QuantConv2d(3, 8, 3, padding=1, activation_spec=None)
    >>> layer(torch.randn(2, 3, 6, 6)).shape
    torch.Size([2, 8, 6, 6])
    >>> layer.weight_quantizer.scale.shape
    torch.Size([8, 1, 1, 1])
    """

    float_type = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | Literal["default"] | None = "default",
    ) -> None:
        nn.Conv2d.__init__(
            self, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype,
        )  # fmt: skip
        self.add_quantizers(weight_spec, default_input_spec(activation_spec))

    @staticmethod
    def constructor_arguments(layer: Any) -> dict[str, Any]:
        """Arguments that make a convolution like this one."""
        names = (
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        )
        return {name: getattr(layer, name) for name in names} | {
            "bias": layer.bias is not None,
            "dtype": layer.weight.dtype,
        }

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """torch's own convolution, padding modes included."""
        y: Tensor = self._conv_forward(x, weight, bias)
        return y
