"""Fake quantization by itself: forward and backward of one tensor, against relu on the same tensor.

Activations are quantized to unsigned 8 bits with a zero point, one scale for all; weights to signed 8 bits, a scale for
every output channel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed_step import memory_format

SHAPES = {"activation": (32, 64, 56, 56), "weight": (512, 512, 3, 3)}
QMIN, QMAX = 0, 255
WEIGHT_QMIN, WEIGHT_QMAX = -127, 127
SPREAD = {"activation": 1.0, "weight": 0.02}
"""Standard deviation of the values; scales reach to its triple, so that a few are clipped."""


@dataclass(frozen=True)
class Operand:
    """A tensor, and the grid that it is put on.

    Attributes:
        kind: `activation` or `weight`.
        x: the tensor; a leaf that needs a gradient.
        scale: () or (C, 1, 1, 1), a leaf that needs a gradient.
        zero_point: 128 for activations, 0 for weights, of the scale's shape; a leaf that needs a gradient.
        grad: the gradient of the result.
    """

    kind: str
    x: Tensor
    scale: Tensor
    zero_point: Tensor
    grad: Tensor


def operand(
    kind: str, shape: tuple[int, ...], layout: str = "channels_last", device: str = "cpu", dtype: str = "float32"
) -> Operand:
    """Random values, seed 0, on the grid of this kind. The grid is float32 whatever the dtype of the values."""
    torch.manual_seed(0)
    values = SPREAD[kind] * torch.randn(shape, device=device, dtype=getattr(torch, dtype))
    x = values.contiguous(memory_format=memory_format(layout))
    reach = 3 * SPREAD[kind]
    if kind == "activation":
        scale = torch.tensor(2 * reach / (QMAX - QMIN), device=device)
        zero_point = torch.tensor(128.0, device=device)
    else:
        scale = torch.full((shape[0], *(1 for _ in shape[1:])), reach / WEIGHT_QMAX, device=device)
        zero_point = torch.zeros_like(scale)
    grad = torch.randn_like(x)
    return Operand(kind, x.requires_grad_(), scale.requires_grad_(), zero_point.requires_grad_(), grad)


class BothWays:
    """A call runs forward and backward once.

    Attributes:
        forward: returns the tensor on its grid.
        inputs: leaves that get a gradient.
        grad: the gradient of what `forward` returns.
    """

    def __init__(self, given: Operand, forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> None:
        self.forward = forward
        self.inputs = inputs
        self.grad = given.grad

    def __call__(self) -> None:
        torch.autograd.grad(self.forward(), self.inputs, self.grad)


def relu(given: Operand) -> BothWays:
    """The base: an operation that reads and writes as much as a fake quantizer has to."""
    return BothWays(given, lambda: F.relu(given.x), (given.x,))


def qat_operator(given: Operand) -> BothWays:
    """This project's: LSQ+ per tensor, LSQ per channel."""
    from qat.functional import lsq_plus_quantize, lsq_quantize

    if given.kind == "activation":
        inputs = (given.x, given.scale, given.zero_point)
        return BothWays(given, lambda: lsq_plus_quantize(*inputs, QMIN, QMAX), inputs)
    return BothWays(
        given,
        lambda: lsq_quantize(given.x, given.scale, WEIGHT_QMIN, WEIGHT_QMAX),
        (given.x, given.scale),
    )


def plain(given: Operand) -> BothWays:
    """LSQ as papers print it: tensor operations, with detach as the straight-through estimator."""
    low, high = (QMIN, QMAX) if given.kind == "activation" else (WEIGHT_QMIN, WEIGHT_QMAX)
    zero_point = given.zero_point.detach()

    def forward() -> Tensor:
        codes = torch.clamp(given.x / given.scale + zero_point, low, high)
        return (codes + (codes.round() - codes).detach() - zero_point) * given.scale

    return BothWays(given, forward, (given.x, given.scale))


def fake_quantize(given: Operand) -> BothWays:
    """torch.fake_quantize_*: no gradient for the scale."""
    scale, zero_point = given.scale.detach().flatten(), given.zero_point.detach().flatten().int()

    def forward() -> Tensor:
        if given.kind == "activation":
            return torch.fake_quantize_per_tensor_affine(given.x, scale, zero_point, QMIN, QMAX)
        return torch.fake_quantize_per_channel_affine(given.x, scale, zero_point, 0, WEIGHT_QMIN, WEIGHT_QMAX)

    return BothWays(given, forward, (given.x,))


def learnable(given: Operand) -> BothWays:
    """torch._fake_quantize_learnable_*, the private operations of torch.ao."""
    scale = given.scale.detach().flatten().requires_grad_()
    zero_point = given.zero_point.detach().flatten().requires_grad_()
    inputs = (given.x, scale, zero_point)

    def forward() -> Tensor:
        if given.kind == "activation":
            return torch._fake_quantize_learnable_per_tensor_affine(*inputs, QMIN, QMAX, 1.0)
        return torch._fake_quantize_learnable_per_channel_affine(*inputs, 0, WEIGHT_QMIN, WEIGHT_QMAX, 1.0)

    return BothWays(given, forward, inputs)


def ao_fused(given: Operand) -> BothWays:
    """torch.ao's fused observer and fake quantizer; no gradient for the scale."""
    from torch.ao.quantization import default_fused_act_fake_quant, default_fused_per_channel_wt_fake_quant

    chosen = default_fused_act_fake_quant if given.kind == "activation" else default_fused_per_channel_wt_fake_quant
    module: nn.Module = chosen()
    return BothWays(given, lambda: module(given.x), (given.x,))


def brevitas(given: Operand) -> BothWays:
    """Brevitas: a learned scale for activations, the largest absolute value of every channel for weights."""
    import brevitas.nn as bnn
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

    if given.kind == "activation":
        layer = bnn.QuantIdentity(act_quant=Int8ActPerTensorFloat.let(collect_stats_steps=1)).train()
        with torch.no_grad():
            for _ in range(2):
                layer(given.x)
        return BothWays(given, lambda: layer(given.x), (given.x, *layer.parameters()))
    outputs, inputs, *kernel = given.x.shape
    layer = bnn.QuantConv2d(inputs, outputs, tuple(kernel), bias=False, weight_quant=Int8WeightPerChannelFloat).train()
    with torch.no_grad():
        layer.weight.set_(given.x.detach())
    return BothWays(given, lambda: layer.weight_quant(layer.weight)[0], (layer.weight,))


OPERATORS: dict[str, Callable[[Operand], BothWays]] = {
    "relu": relu,
    "qat": qat_operator,
    "plain": plain,
    "fake_quantize": fake_quantize,
    "learnable": learnable,
    "ao_fused": ao_fused,
    "brevitas": brevitas,
}
