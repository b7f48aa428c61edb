"""Whether a quantizer's values are those of its integers, quantize(x) = (codes(x) - zero_point) * scale, and whether a
runtime computes the same integers."""

import torch
from torch import Tensor, nn

from qat.layers import QuantFunction, QuantLayer
from qat.quantizer import Quantizer


@torch.no_grad()
def keeps_to_its_grid(quantizer: Quantizer, x: Tensor) -> bool:
    """Whether quantize(x) = (codes(x) - zero_point) * scale."""
    scale, zero_point = quantizer.grid(x)
    expected = (quantizer.codes(x) - zero_point) * scale
    # The difference of NaN weights is NaN and passes; they are refused when their integers are stored.
    off = (quantizer.quantize(x) - expected).abs() > 1e-5 * expected.abs() + 1e-6 * scale
    return not bool(off.any())


@torch.no_grad()
def rounds_half_to_even(quantizer: Quantizer) -> bool:
    """Whether codes(x) = clamp(round(x / scale) + zero_point) between the levels too, halves to the even integer.

    So every runtime computes an activation's integers from scale and zero point; a weight's are stored.
    """
    if quantizer.role == "weight":
        return True
    scale, zero_point = quantizer.grid()
    low, high = quantizer.bounds()
    x = (torch.arange(low, high, device=scale.device) + 0.5 - zero_point) * scale
    return torch.equal(quantizer.codes(x), torch.clamp(torch.round(x / scale) + zero_point, low, high))


def sample_for(model: nn.Module, name: str, quantizer: Quantizer) -> Tensor:
    """A tensor to try a quantizer of a model on: its weight, or points on, between and outside the levels."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, QuantLayer) and owner.weight_quantizer is quantizer and not isinstance(owner, QuantFunction):
        return owner.channels_first(owner.weight.detach())
    scale, zero_point = quantizer.grid()
    low, high = quantizer.bounds()
    points = torch.linspace(low - 1.3, high + 1.7, 61, device=scale.device)
    return (points - zero_point.reshape(*zero_point.shape[:-1], -1)) * scale.reshape(*scale.shape[:-1], -1)
