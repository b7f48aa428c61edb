"""References for the functions of a fused graph: the same computation in torch's own operations on floats."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat.fused.activation_table import PLAIN_CURVES
from qat.fused.activations import NO_CLIP
from qat.fused.functions.codes import decode, encode
from qat.fused.functions.curves import quantize_curve, quantize_softmax
from qat.fused.functions.matmuls import matmul
from qat.fused.functions.movement import drop, reshape, reshape_by, shape_of
from qat.fused.functions.norm_activation import Clip, quantize_chain, quantize_sum
from qat.fused.functions.pools import max_pool
from qat.fused.functions.products import multiply
from qat.fused.functions.scale_repair import repair
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.torch_internals import AnyBatchNorm


class Before(NamedTuple):
    """The computation before a quantizer.

    Attributes:
        y: the input of the clip.
        z: the input of the quantizer.
        bounds: the bounds of the clip.
    """

    y: Tensor
    z: Tensor
    bounds: tuple[float, float] = NO_CLIP


def before_chain(
    y: Tensor, quantizer: Quantizer, norm: Callable[[Tensor], Tensor] | None = None, floor: float = -torch.inf,
    ceiling: float = torch.inf, activation: nn.Module | None = None,
) -> Before:  # fmt: skip
    """norm, then clip."""
    x = y if norm is None else norm(y)
    return Before(x, _clipped(x, floor, ceiling, activation), (floor, ceiling))


def normalised(y: Tensor, norm: AnyBatchNorm) -> Tensor:
    """norm(y), computed in float64: torch's own loses digits where variances are small.

    weight * (y - mean) / sqrt(var + eps) + bias, with statistics of the batch or the running ones
    """
    axes, shape = [0, *range(2, y.dim())], [1, -1, *[1] * (y.dim() - 2)]
    wide = y.double()
    if norm.training or norm.running_mean is None:
        with torch.no_grad():
            norm(y)  # moves the running statistics
        var, mean = torch.var_mean(wide, axes, correction=0)
    else:
        assert norm.running_var is not None
        mean, var = norm.running_mean.double(), norm.running_var.double()
    z = (wide - mean.view(shape)) * torch.rsqrt(var + norm.eps).view(shape)
    if norm.affine:
        z = z * norm.weight.double().view(shape) + norm.bias.double().view(shape)
    return z.to(y.dtype)


def before_sum(
    a: Tensor, b: Tensor, quantizer: Quantizer, floor: float = -torch.inf, ceiling: float = torch.inf,
    activation: nn.Module | None = None,
) -> Before:  # fmt: skip
    """Sum, then clip."""
    return Before(a + b, _clipped(a + b, floor, ceiling, activation), (floor, ceiling))


def before_curve(x: Tensor, quantizer: Quantizer, curve: str, activation: nn.Module | None = None) -> Before:
    """The activation."""
    y = PLAIN_CURVES[curve](x) if activation is None else activation(x.clone())
    return Before(y, y)


def before_softmax(
    x: Tensor, quantizer: Quantizer, axis: int, multiplier: float = 1.0, softmax: nn.Module | None = None
) -> Before:
    """Softmax of the scores times a number."""
    scores = x if multiplier == 1 else x * multiplier
    y = torch.softmax(scores, axis) if softmax is None else softmax(scores)
    return Before(y, y)


def _clipped(x: Tensor, floor: float, ceiling: float, activation: nn.Module | None) -> Tensor:
    # On a copy: the clip may write into its input, which is read once more.
    return Clip(floor, ceiling, activation)(x.clone())


def product(
    layer: QuantLayer, x: Tensor, input_quantizer: Quantizer, *operands: Tensor | None, copies: int = 1
) -> Tensor:
    """The layer's own computation in training."""
    weight, bias = (*operands, None)[:2] if operands else (layer.weight, layer.bias)
    assert weight is not None
    return layer.compute(x, weight, bias, input_quantizer, None)


def pooled(x: Tensor, window: tuple[Any, ...], module: nn.Module | None = None) -> Tensor:
    """torch's max pool."""
    y: Tensor = torch.nn.functional.max_pool2d(x, *window) if module is None else module(x)
    return y


QUANTIZING: dict[Any, Callable[..., Before]] = {
    quantize_chain: before_chain,
    quantize_sum: before_sum,
    quantize_curve: before_curve,
    quantize_softmax: before_softmax,
}
"""Functions that end in a quantizer, which is their first module, and the computation before it."""

COMPUTING: dict[Any, Callable[..., Tensor]] = {multiply: product, matmul: torch.matmul, max_pool: pooled}
"""Functions that compute with codes."""

MOVING: dict[Any, Callable[..., Any]] = {
    encode: lambda x, *rest: x,
    decode: lambda x: x,
    drop: lambda x, dropout: dropout(x),
    reshape: lambda x, method, *args, **kwargs: getattr(x, method)(*args, **kwargs),
    reshape_by: lambda x, module: module(x),
    shape_of: lambda x: x,
    repair: repair,
}
"""Functions that change no value."""
