"""Convolutions and transposed convolutions on integer grids."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.layers.base import QuantLayer
from qat.layers.twins import ActivationSpec, register_twin
from qat.quantizer import Quantizer
from qat.spec import QuantSpec
from qat.torch_internals import output_padding_of

# By the number of spatial axes.
TRANSPOSED: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class QuantConvolution(QuantLayer):
    """Base of the three convolutions, whose other base is torch's layer.

    y = conv(quantize(x), quantize(weight)) + bias; arguments as of torch's layer, and those of `QuantLayer`. Padding
    adds the value 0.0 or copies of x, which lie on the grid of x.
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
        layer: Any = self  # one of torch's, which knows the padding modes
        y: Tensor = layer._conv_forward(x, weight, bias)
        return y


@register_twin(nn.Conv1d)
class QuantConv1d(QuantConvolution, nn.Conv1d):
    """`torch.nn.Conv1d` with quantized weight and input.

    Arguments: see `QuantConvolution`. Shapes: input (N, in_channels, L) or (in_channels, L), output (N, out_channels,
    L') or (out_channels, L').

    >>> layer = QuantConv1d(3, 8, 5, padding="same", padding_mode="circular", activation_spec=None)
    >>> layer(torch.randn(2, 3, 20)).shape
    torch.Size([2, 8, 20])
    """


@register_twin(nn.Conv2d)
class QuantConv2d(QuantConvolution, nn.Conv2d):
    """`torch.nn.Conv2d` with quantized weight and input.

    Arguments: see `QuantConvolution`. Shapes: input (N, in_channels, H, W), output (N, out_channels, H', W'), N absent
    in both or in neither.

    >>> layer = QuantConv2d(3, 8, 3, padding=1, activation_spec=None)
    >>> layer(torch.randn(2, 3, 6, 6)).shape
    torch.Size([2, 8, 6, 6])
    >>> layer.weight_quantizer.scale.shape
    torch.Size([8, 1, 1, 1])
    """


@register_twin(nn.Conv3d)
class QuantConv3d(QuantConvolution, nn.Conv3d):
    """`torch.nn.Conv3d` with quantized weight and input.

    Arguments: see `QuantConvolution`. Shapes: input (N, in_channels, D, H, W), output (N, out_channels, D', H', W'), N
    absent in both or in neither.

    >>> layer = QuantConv3d(3, 4, (1, 3, 3), stride=(1, 2, 2), activation_spec=None)
    >>> layer(torch.randn(2, 3, 4, 7, 7)).shape
    torch.Size([2, 4, 4, 3, 3])
    """


class QuantTransposedConvolution(QuantLayer):
    """Base of the three transposed convolutions, whose other base is torch's layer.

    y = conv_transpose(quantize(x), quantize(weight)) + bias; arguments as of torch's layer, and those of `QuantLayer`.
    "channel" means output channel here too, although torch keeps the input channels on the weight's axis 0.
    """

    groups: int

    argument_names = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "output_padding", "groups", "dilation",
        "padding_mode",
    )  # fmt: skip

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: Literal["zeros"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
            padding_mode, device, dtype,
        )  # fmt: skip
        self.add_quantizers(weight_spec, activation_spec)

    def forward(
        self,
        x: Tensor,
        input_quantizer: Quantizer | None = None,
        norm: nn.Module | None = None,
        bias: Tensor | None = None,
        output_size: Sequence[int] | None = None,
    ) -> Tensor:
        """Apply the layer; output_size, by name, chooses among the shapes of the stride."""
        # torch's layer has output_size in this place.
        if input_quantizer is not None and not isinstance(input_quantizer, Quantizer):
            raise TypeError(
                f"{type(self).__name__}: input_quantizer must be a Quantizer, got {input_quantizer!r};"
                " pass an output size as output_size="
            )
        own = self.bias if bias is None else bias
        return self.compute(x, self.weight, own, input_quantizer, norm, output_size=output_size)

    def operate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        layer: Any = self
        rest = output_padding_of(layer, x, None if output_size is None else list(output_size))
        convolve = TRANSPOSED[weight.dim() - 2]
        return convolve(x, weight, bias, layer.stride, layer.padding, rest, self.groups, layer.dilation)

    def channels_first(self, weight: Tensor) -> Tensor:
        """Exchange axes 0 and 1 within each group: (g * a, b, k...) to (g * b, a, k...)."""
        groups = self.groups
        return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)

    torch_layout = channels_first  # its own inverse


@register_twin(nn.ConvTranspose1d)
class QuantConvTranspose1d(QuantTransposedConvolution, nn.ConvTranspose1d):  # type: ignore[misc]
    """`torch.nn.ConvTranspose1d` with quantized weight and input.

    Arguments: see `QuantTransposedConvolution`. Shapes: input (N, in_channels, L), output (N, out_channels, L'), N
    absent in both or in neither.

    >>> layer = QuantConvTranspose1d(3, 8, 4, stride=2, padding=1, activation_spec=None)
    >>> layer(torch.randn(2, 3, 10)).shape
    torch.Size([2, 8, 20])
    """


@register_twin(nn.ConvTranspose2d)
class QuantConvTranspose2d(QuantTransposedConvolution, nn.ConvTranspose2d):  # type: ignore[misc]
    """`torch.nn.ConvTranspose2d` with quantized weight and input.

    Arguments: see `QuantTransposedConvolution`. Shapes: input (N, in_channels, H, W), output (N, out_channels, H', W'),
    N absent in both or in neither.

    >>> layer = QuantConvTranspose2d(3, 8, 3, stride=2, activation_spec=None)
    >>> layer(torch.randn(2, 3, 6, 6), output_size=(14, 13)).shape
    torch.Size([2, 8, 14, 13])
    """


@register_twin(nn.ConvTranspose3d)
class QuantConvTranspose3d(QuantTransposedConvolution, nn.ConvTranspose3d):  # type: ignore[misc]
    """`torch.nn.ConvTranspose3d` with quantized weight and input.

    Arguments: see `QuantTransposedConvolution`. Shapes: input (N, in_channels, D, H, W), output (N, out_channels, D',
    H', W'), N absent in both or in neither.

    >>> layer = QuantConvTranspose3d(4, 6, 2, stride=2, groups=2, activation_spec=None)
    >>> layer(torch.randn(1, 4, 2, 3, 3)).shape
    torch.Size([1, 6, 4, 6, 6])
    """
