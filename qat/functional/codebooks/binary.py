"""Binary weights: one scale a channel and a sign (XNOR-Net, Bi-Real, IR-Net)."""

from typing import Literal, get_args

import torch
from torch import Tensor

from qat.functional.channels import ChannelAxis, axes_within_channel, mean_magnitude
from qat.functional.sign import SignGradientFunction
from qat.functional.tensors import apply, as_dtype, check_known, require_floating, tensor_beside

BinaryGradient = Literal["clipped", "approximate", "error_decay", "straight_through"]


class BinaryFunction(SignGradientFunction):
    """Take the sign times a constant scale, with `binary_quantize`'s gradient."""

    @staticmethod
    def forward(weight: Tensor, scale: Tensor, gradient: BinaryGradient, progress: Tensor | None) -> Tensor:
        # a NaN is in its channel's mean too, so it stays one
        return as_dtype(torch.where(weight >= 0, scale, -scale), weight.dtype)


def binary_quantize(
    weight: Tensor,
    channel_axis: ChannelAxis = 0,
    gradient: BinaryGradient = "clipped",
    progress: Tensor | float | None = None,
) -> Tensor:
    """Put every channel of a weight on -m and +m, with m its mean magnitude.

    y = sign(weight) * mean|weight| over the channel, with sign(0) = +1, so that a channel of zeros stays one. The mean
    is a constant, and by `gradient`

        "clipped":           dy/dweight = 1               where |weight| <= 1, else 0 (XNOR-Net)
        "approximate":       dy/dweight = 2 - 2 |weight|  where |weight| <= 1, else 0 (Bi-Real)
        "error_decay":       dy/dweight = k t (1 - tanh(t weight)^2), t = 0.1 * 10^(2 progress), k = max(1/t, 1):
                             from nearly the identity's to nearly the sign's as training proceeds (IR-Net)
        "straight_through":  dy/dweight = 1

    Args:
        progress: for "error_decay", and for it alone: how much of the training is done, 0..1; a tensor () or a number.

    Source: Rastegari et al., "XNOR-Net", arXiv:1603.05279; Liu et al., "Bi-Real Net", arXiv:1808.00278; Qin et al.,
    "IR-Net", arXiv:1909.10788. Deviations: as the published code does, the mean is a constant and no factor of the
    gradient, where XNOR-Net's text has both; weights are not balanced first as in IR-Net.

    >>> weight = torch.tensor([[0.5, -1.5], [0.0, 0.25]], requires_grad=True)
    >>> y = binary_quantize(weight)
    >>> y.sum().backward()
    >>> y.tolist(), weight.grad.tolist()
    ([[1.0, -1.0], [0.125, 0.125]], [[1.0, 0.0], [1.0, 1.0]])
    """
    require_floating(weight, "binary_quantize")
    check_known("gradient", gradient, get_args(BinaryGradient), "binary_quantize")
    if progress is None and gradient == "error_decay":
        raise ValueError("binary_quantize: gradient 'error_decay' needs progress, a number in 0..1, got None")
    if progress is not None:
        if gradient != "error_decay":
            raise ValueError(f"binary_quantize: only gradient 'error_decay' takes progress, got it with '{gradient}'")
        if not isinstance(progress, Tensor) and not 0 <= progress <= 1:
            raise ValueError(f"binary_quantize: progress must lie in 0..1, got {progress}")
        progress = tensor_beside(weight, progress)
    mean = mean_magnitude(weight.detach(), axes_within_channel(weight, channel_axis, "binary_quantize"))
    return apply(BinaryFunction, weight, mean, gradient, progress)


def binary_scale(weight: Tensor, channel_axis: ChannelAxis = 0) -> Tensor:
    """Return the level mean|weight| of every channel, kept > 0, in float32 at least."""
    require_floating(weight, "binary_scale")
    mean = mean_magnitude(weight, axes_within_channel(weight, channel_axis, "binary_scale"))
    return torch.where(mean == 0, torch.finfo(mean.dtype).tiny, mean)
