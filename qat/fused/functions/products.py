"""Products on codes: convolutions and linear layers, whose Function keeps only codes and weight, and matmuls.

The weight is quantized inside, and again in the backward; the input's codes are a quarter of its floats. The forward
multiplies integers where the processor does so exactly and it pays, else floats on the same grids.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.fused.functions.codes import (
    Codes,
    Learned,
    decode,
    detached_view,
    first_derivative,
    learned_by,
    mode_refusal,
    rule_refusal,
    with_scale_gradient,
)
from qat.kernels import integers_allowed
from qat.kernels.cpu.quantizers import Levels, is_plain, rows_of
from qat.kernels.geometry import LINEAR, Geometry
from qat.kernels.operators.products import (
    codes_matmul,
    codes_matmul_backward,
    codes_product,
    codes_product_backward,
    dense_matrices,
    input_scale_gradient,
)
from qat.layers.base import QuantLayer
from qat.layers.conv import QuantConvolution
from qat.layers.function import CONVOLUTIONS, QuantFunction
from qat.layers.linear import QuantLinear
from qat.quantizer import Quantizer


class CodesProductFunction(torch.autograd.Function):
    """y = product((codes - zero) * step, lsq(weight)) + bias.

    Forward:    quantize the weight; multiply integers, or both operands in float
    Backward:   that of the product in float, its operands quantized again; then LSQ's for the weight and its scales
    """

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, scale: Tensor, smallest: Tensor,
        bias: Tensor | None, levels: Levels, geometry: Geometry, batch_factor: int,
    ) -> Tensor:  # fmt: skip
        """scale and smallest are the weight's; batch_factor is that of `multiply`, or 0 for no integers."""
        ctx.save_for_backward(codes, qparams, weight, scale, smallest)
        ctx.levels, ctx.geometry = levels, geometry
        grid = [scale, smallest, None]
        y = codes_product(codes, qparams, weight, grid, levels, bias, geometry.packed(), batch_factor)
        return detached_view(y)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (codes, qparams, weight, scale, smallest), needs = ctx.saved_tensors, ctx.needs_input_grad
        wanted = (needs[0], needs[3] or needs[4], needs[6])
        grad_x, grad_weight, grad_scale, grad_bias = codes_product_backward(
            grad, codes, qparams, weight, [scale, smallest, None], ctx.levels, ctx.geometry.packed(), *wanted
        )
        learned = (grad_weight if needs[3] else None, grad_scale if needs[4] else None, None)
        return grad_x if wanted[0] else None, None, None, *learned, grad_bias if wanted[2] else None, *[None] * 3


class InputScaleFunction(torch.autograd.Function):
    """Returns a product as it is, and adds the gradient of its input's scale, if the input needs no gradient.

    Forward:    y
    Backward:   dy = grad;    dscale = sum(grad * product(dx/dscale, weight))

    A product is linear, so the scale's derivative goes forward through it: one more product instead of the gradient of
    the input.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, weight: Tensor,
        weight_scale: Tensor, weight_smallest: Tensor, levels: Levels, weight_levels: Levels, geometry: Geometry,
    ) -> Tensor:  # fmt: skip
        """Computes nothing; compiled code may not return a view here, so it multiplies by 1."""
        ctx.save_for_backward(x, scale, smallest, zero_point, weight, weight_scale, weight_smallest)
        ctx.levels, ctx.weight_levels, ctx.geometry = levels, weight_levels, geometry
        return y * 1 if torch.compiler.is_compiling() else detached_view(y)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing hands every tensor out a single time
        x, *grid = saved[:4]
        weight, *weight_grid = saved[4:]
        grad_scale = input_scale_gradient(
            grad, x, grid, ctx.levels, weight, [*weight_grid, None], ctx.weight_levels, ctx.geometry.packed()
        )
        return grad, None, grad_scale, *[None] * 8


def multiply(
    layer: QuantLayer, x: Codes | Tensor, input_quantizer: Quantizer, *operands: Tensor | None, batch_factor: int = 1
) -> Tensor:  # fmt: skip
    """layer(x, *operands, input_quantizer=input_quantizer) without a norm, on codes where kernels apply.

    Operands are weight and bias of a `QuantFunction`. Where x is a slice of a batch `batch_factor` times as large, the
    size of that batch decides whether integers pay.
    """
    weight, bias = _parameters(layer, operands)
    geometry = _geometry(layer)
    learned = _learned(weight, layer.weight_quantizer)
    if (
        not isinstance(x, Codes) or geometry is None or learned is None
        or not (bias is None or (is_plain(bias) and bias.dim() == 1))
        or (geometry.stride and x.dim() != len(geometry.stride) + 2)
    ):  # fmt: skip
        return layer.compute(decode(x), weight, bias, input_quantizer, None)
    scale, smallest, _, levels = learned
    y: Tensor = CodesProductFunction.apply(
        *x[:3], weight, scale, smallest, bias, levels, geometry, batch_factor * integers_allowed()
    )
    if x.source is not None and torch.is_grad_enabled():
        source, of_input = x.source
        fixed = (weight.detach(), scale.detach(), smallest)
        y = InputScaleFunction.apply(y, source, *of_input[:3], *fixed, of_input.levels, levels, geometry)
    return y


def layer_refusal(layer: QuantLayer) -> str | None:
    """Why a layer cannot compute on codes, by its kind and its grid; None if it can."""
    of_function = isinstance(layer, QuantFunction) and (layer.function is F.linear or layer.function in CONVOLUTIONS)
    if not (of_function or isinstance(layer, (QuantConvolution, QuantLinear))):
        return "kernels multiply in convolutions and linear layers only"
    if not layer.training:
        return "it is in evaluation"
    if getattr(layer, "calibrating", False):
        return "it is being calibrated"
    reason = _grid_refusal(layer.weight_quantizer)
    if reason is not None:
        return f"its weight_quantizer: {reason}"
    return "its padding is not zero padding of a fixed size" if _geometry(layer) is None else None


def _grid_refusal(quantizer: Quantizer) -> str | None:
    spec = quantizer.spec
    if not (spec.symmetric and spec.signed):
        return f"its grid is {spec}, and kernels multiply by signed symmetric weights"
    if spec.granularity == "group":
        return "it has a scale per group of inputs, and kernels take one per row or one in all"
    return rule_refusal(quantizer) or mode_refusal(quantizer)


def weight_refusal(weight: Tensor) -> str | None:
    """Why kernels do not take a weight; None if they do."""
    if not is_plain(weight):
        return f"its weight is {weight.dtype} on {weight.device.type}, or of a subclass of torch.Tensor"
    if not weight.numel():
        return "its weight is empty"
    dense = weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last))
    return None if dense else "its weight is not contiguous"


def integers_refusal(layer: QuantLayer, x: torch.Size | None, weight: torch.Size, zero: float) -> str | None:
    """Why a layer on codes multiplies in float; None if it multiplies integers (where it pays, if x is None)."""
    geometry = _geometry(layer)
    assert geometry is not None
    if not integers_allowed():
        return "float_products is on"
    reason = geometry.integers_refusal(x, weight, zero)
    if reason is not None:
        return reason
    return None if geometry.is_exact(weight) else "this processor multiplies such integers inexactly (it has no VNNI)"


def _parameters(layer: Any, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    if isinstance(layer, QuantFunction):
        weight, bias = (*operands, None)[:2]
        assert weight is not None
        return weight, bias
    return layer.weight, layer.bias


def _geometry(layer: Any) -> Geometry | None:
    """The geometry of a layer; None if its padding is not zero padding of a fixed size."""
    if isinstance(layer, QuantFunction):
        axes = CONVOLUTIONS.index(layer.function) + 1 if layer.function in CONVOLUTIONS else 0
        return Geometry.of(axes, **layer.options) if axes else LINEAR
    if isinstance(layer, nn.Linear):
        return LINEAR
    if layer.padding_mode != "zeros":
        return None
    return Geometry.of(len(layer.stride), layer.stride, layer.padding, layer.dilation, layer.groups, layer.kernel_size)


def _learned(weight: Tensor, quantizer: Quantizer) -> Learned | None:
    """What kernels need of a weight's quantizer; None if they do not take the two."""
    if weight_refusal(weight) is not None:
        return None
    learned = learned_by(quantizer, weight, None)
    return learned if learned is not None and rows_of(weight, learned.scale) else None


class MatmulFunction(torch.autograd.Function):
    """y = ((a - a_zero) * a_step) @ ((b - b_zero) * b_step), both codes, which the backward decodes again."""

    @staticmethod
    def forward(
        ctx: Any, a_carrier: Tensor, b_carrier: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
    ) -> Tensor:
        """a and b: codes, made `dense_matrices`."""
        ctx.save_for_backward(a, b, a_qparams, b_qparams)
        return detached_view(codes_matmul(a, b, a_qparams, b_qparams))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *codes_matmul_backward(grad, *ctx.saved_tensors), None, None, None, None


def matmul(a: Codes | Tensor, b: Codes | Tensor) -> Tensor:
    """a @ b, on codes if both operands are codes and have the same axes before the last two."""
    if not (
        isinstance(a, Codes) and isinstance(b, Codes) and a.dim() == b.dim() >= 3
        and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2] and a.codes.numel() and b.codes.numel()
        and not (torch.compiler.is_compiling() and a.qparams is b.qparams)  # torch.compile takes no tensor twice
    ):  # fmt: skip
        return torch.matmul(decode(a), decode(b))
    a, b = with_scale_gradient(a), with_scale_gradient(b)
    y: Tensor = MatmulFunction.apply(
        a.carrier, b.carrier, dense_matrices(a.codes), dense_matrices(b.codes), a.qparams, b.qparams
    )  # fmt: skip
    return y
