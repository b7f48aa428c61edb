"""DoReFa-Net: weights squashed by tanh, activations clipped to 0 .. 1."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.channels import ChannelAxis, axes_within_channel, mean_magnitude, over
from qat.functional.codebooks.binary import BinaryFunction
from qat.functional.tensors import STEFunction, apply, as_dtype, check_bits, require_floating, widened


class DoReFaWeightFunction(STEFunction):
    """Squash by tanh, divide by the largest magnitude, round onto -1 .. 1.

    Forward, with n = 2^bits - 1, t = tanh(weight), M = max|t| over `axes` and u = t / M:
                 y = 2 * round((u / 2 + 1/2) * n) / n - 1
    Backward:    dy/dweight = du/dweight, the rounding passed straight through: with G = dL/dy,
                 dL/dt = (G - share * sign(t) * sum(G * u)) / M and dL/dweight = dL/dt * (1 - t^2)

    share is 1 / (number of ties) where |t| = M, else 0: the gradient of the maximum, as torch.amax gives it.
    Where all weights that share M are zero it counts as 1, so that y and the gradient stay finite.
    """

    @staticmethod
    def forward(weight: Tensor, bits: int, axes: tuple[int, ...]) -> Tensor:
        steps = 2**bits - 1
        squashed, largest = _squash(weight, axes)
        codes = torch.round((squashed / largest * 0.5 + 0.5) * steps)
        # (2k - n) / n rounds once and is symmetric around zero to the last bit
        return as_dtype((2 * codes - steps) / steps, weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,), (_, axes) = ctx.saved_tensors, ctx.options
        squashed, largest = _squash(weight, axes)
        upstream = grad.to(squashed.dtype)
        ties = (squashed.abs() == largest).to(squashed.dtype)
        share = ties / over(torch.sum, ties, axes).clamp(min=1)
        through_largest = over(torch.sum, upstream * (squashed / largest), axes) * share * torch.sign(squashed)
        grad_weight = (upstream - through_largest) / largest * (1 - squashed**2)
        return grad_weight.to(weight.dtype), None, None


class DoReFaActivationFunction(STEFunction):
    """Clip to 0 .. 1 and round onto 2^bits - 1 equal steps."""

    @staticmethod
    def forward(x: Tensor, bits: int) -> Tensor:
        steps = 2**bits - 1
        (value,) = widened(x)
        return as_dtype(torch.round(torch.clamp(value, 0, 1) * steps) / steps, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where((x >= 0) & (x <= 1), grad, 0), None


def dorefa_quantize_weight(weight: Tensor, bits: int, channel_axis: ChannelAxis = None) -> Tensor:
    """Put a weight on DoReFa's 2^bits levels from -1 to 1.

    y and the gradient are those of `DoReFaWeightFunction`; the levels are odd multiples of 1 / (2^bits - 1), and so
    zero is not one of them. For bits = 1, y = sign(weight) * mean|weight| with sign(0) = +1, and dy/dweight = 1.

    Source: Zhou et al., "DoReFa-Net", arXiv:1606.06160. Deviation: the maximum gets its gradient (many
    re-implementations detach it).

    >>> weight = torch.tensor([0.5, -0.1, 0.0], requires_grad=True)
    >>> y = dorefa_quantize_weight(weight, 2)
    >>> [round(value, 4) for value in y.tolist()]
    [1.0, -0.3333, 0.3333]
    >>> y.sum().backward()
    >>> [round(value, 4) for value in weight.grad.tolist()]
    [0.367, 2.1425, 2.164]
    >>> [round(value, 4) for value in dorefa_quantize_weight(weight, 1).tolist()]
    [0.2, -0.2, 0.2]
    """
    check_bits(bits, "dorefa_quantize_weight")
    require_floating(weight, "dorefa_quantize_weight")
    axes = axes_within_channel(weight, channel_axis, "dorefa_quantize_weight")
    if bits == 1:
        return apply(BinaryFunction, weight, mean_magnitude(weight.detach(), axes), "straight_through", None)
    return apply(DoReFaWeightFunction, weight, bits, axes)


def dorefa_quantize_activation(x: Tensor, bits: int) -> Tensor:
    """Put an activation on DoReFa's 2^bits levels from 0 to 1.

    y = round(clip(x, 0, 1) * n) / n with n = 2^bits - 1; dy/dx = 1 where 0 <= x <= 1, else 0.

    Source: Zhou et al., "DoReFa-Net", arXiv:1606.06160.

    >>> x = torch.tensor([-0.1, 0.5, 0.9, 1.0, 1.1], requires_grad=True)
    >>> y = dorefa_quantize_activation(x, 1)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 0.0])
    """
    check_bits(bits, "dorefa_quantize_activation")
    return apply(DoReFaActivationFunction, require_floating(x, "dorefa_quantize_activation"), bits)


def _squash(weight: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    squashed = torch.tanh(widened(weight)[0])
    size = squashed.abs()
    largest = over(torch.amax, size, axes) if size.numel() else size  # amax refuses an empty axis
    return squashed, torch.where(largest < torch.finfo(size.dtype).tiny, 1, largest)  # never 0: it divides
