"""QuantFunction: a function with quantized weight and input as arguments."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.layers.base import QuantLayer, quantizer_or_none, resolved_weight_spec
from qat.layers.twins import ActivationSpec
from qat.quantizer import Quantizer, create_quantizer, scale_shape
from qat.spec import QuantSpec

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
# The functions that can be quantized, and the float layers that compute the same.
FLOAT_TYPES: dict[Callable[..., Tensor], type[nn.Module]] = {
    F.linear: nn.Linear,
    F.conv1d: nn.Conv1d,
    F.conv2d: nn.Conv2d,
    F.conv3d: nn.Conv3d,
}


class QuantFunction(QuantLayer):
    """`F.linear` or `F.conv2d` on integer grids, with a weight that no layer owns.

    Models read weights of other modules (`F.linear(x, self.qkv.weight)`), slices (`in_proj_weight[:embed_dim]`), or
    computed weights. The weight stays where it is. This module holds its quantizer and computes as the other quantized
    layers do.

    Args:
        function: F.linear, F.conv1d, F.conv2d or F.conv3d, else a ValueError.
        weight_shape: shape of the weight with which it will be called.
        options: keyword arguments of the function other than input, weight and bias.
        weight_spec, activation_spec: as in `QuantLayer`, but that the input is quantized elsewhere by default.
        device: device of the quantizers.

    >>> weight = nn.Parameter(torch.randn(6, 4))
    >>> project = QuantFunction(F.linear, (2, 4))
    >>> project.fit_weight(weight[:2])
    >>> project(torch.randn(3, 4), weight[:2], None).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        weight_shape: tuple[int, ...],
        options: Mapping[str, Any] | None = None,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if function not in FLOAT_TYPES:
            raise ValueError(f"QuantFunction: {getattr(function, '__name__', function)} is not linear or a convolution")
        self.function, self.kernel_size = function, weight_shape[2:]
        self.options = dict(options or {})
        spec = resolved_weight_spec(weight_spec)
        self.weight_quantizer = create_quantizer(spec, "weight", scale_shape(spec, weight_shape), device)
        self.input_quantizer = quantizer_or_none(activation_spec, device)
        if self.input_quantizer is not None:
            self.input_quantizer.summed_axis = self.input_axis
        self.calibrating = False

    @property
    def float_type(self) -> type[nn.Module]:  # type: ignore[override]
        """Float layer that computes the same."""
        return FLOAT_TYPES[self.function]

    def calibrate_weight(self) -> None:
        pass  # there is no weight here: forward observes it while `calibrating` is set

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        input_quantizer: Quantizer | None = None,
        norm: nn.Module | None = None,
    ) -> Tensor:
        if self.calibrating:
            self.fit_weight(weight)
        return self.compute(x, weight, bias, input_quantizer, norm)

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.function(x, weight, bias, **self.options)

    def extra_repr(self) -> str:
        return self.function.__name__
