"""Convolutions and linear layers on codes.

    y = product((codes - zero) * step, integers * steps) + bias, integers = clamp(round(weight / steps), low, high)

The layer quantizes its weight and keeps codes and weight only. The grid of a weight holds its scales (one, or one for
each row), their smallest values, and None. The sums are in integers where they are exact and pay, else in float on the
same grids.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.codes.operators.codes import Codes, Context, detached_view, first_derivative
from qat.codes.operators.geometry import LINEAR, Geometry, to_layout
from qat.codes.operators.grid import (
    Learned,
    grid_in_force,
    learned_by,
    learned_gradient,
    mode_refusal,
    rule_refusal,
    slopes,
    slopes_on,
    step_in_force,
)
from qat.codes.operators.operator import operator
from qat.codes.operators.quantize import _dequantize, decode
from qat.codes.operators.values import weight_values
from qat.kernels import integers_allowed, passes_values
from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import (
    Levels,
    compiled,
    dequantize,
    empty_scale,
    in_layout_of,
    is_plain,
    learned_grid,
    quantize_rows,
    quantize_rows_backward,
    rows_of,
    scales_of,
    threads_for,
)
from qat.kernels.cpu.structures import GridTensors
from qat.layers.base import QuantLayer
from qat.layers.conv import QuantConvolution
from qat.layers.function import CONVOLUTIONS, QuantFunction
from qat.layers.linear import QuantLinear
from qat.quantizer import Quantizer
from qat.torch_internals import AnyConvolution


def _codes_product(
    codes: Tensor, qparams: Tensor, weight: Tensor, grid: GridTensors, levels: list[float], bias: Tensor | None,
    geometry: list[int], batch_factor: int,
) -> Tensor:  # fmt: skip
    product = Geometry.unpacked(geometry)
    y = product.multiply(_dequantize(codes, qparams), _weight_on_grid(weight, grid, levels)[0], bias)
    return y.contiguous(memory_format=product.layout(codes, weight))


def _codes_product_backward(
    grad: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, grid: GridTensors, levels: list[float],
    geometry: list[int], needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the tensor behind the codes, of weight, scales and bias.

    dvalues: the gradient of the weight on its grid;  then LSQ's, per row:
        dweight = dvalues inside the grid;  dscales = factor * sum(dvalues * slope)
    """
    values, v = _weight_on_grid(weight, grid, levels)
    found = Geometry.unpacked(geometry).gradients(
        grad, _dequantize(codes, qparams), values, (needs_x, needs_weight, needs_bias)
    )
    grad_x, grad_weight, grad_bias = (grad.new_empty(0) if each is None else each for each in found)
    grad_scales = grad.new_empty(0)
    if needs_weight:
        inside, slope = slopes(v, levels[0], levels[1])
        total = (grad_weight * slope).flatten(1).sum(1)
        grad_scales = learned_gradient(total if scales_of(grid)[0].numel() > 1 else total.sum(), grid, levels)
        grad_weight = in_layout_of(torch.where(inside, grad_weight, 0.0), weight)
    return in_layout_of(grad_x, codes) if needs_x else grad_x, grad_weight, grad_scales, grad_bias


def _input_scale_gradient(
    grad: Tensor, x: Tensor, grid: GridTensors, levels: list[float], weight: Tensor, weight_grid: GridTensors,
    weight_levels: list[float], geometry: list[int],
) -> Tensor:  # fmt: skip
    _, slope = slopes_on(x, grid_in_force(grid, levels))
    values, _ = _weight_on_grid(weight, weight_grid, weight_levels)
    return learned_gradient((grad * Geometry.unpacked(geometry).multiply(slope, values, None)).sum(), grid, levels)


def _weight_on_grid(weight: Tensor, grid: GridTensors, levels: list[float]) -> tuple[Tensor, Tensor]:
    # The weight on its grid of one scale, or one per row, and weight / scale.
    scales, smallest = scales_of(grid)
    steps = step_in_force(scales, smallest.reshape(scales.shape)).reshape(-1, *[1] * (weight.dim() - 1))
    v = weight / steps
    return torch.round(v).clamp(levels[0], levels[1]) * steps, v


@operator(_codes_product)
def codes_product(
    codes: Tensor, qparams: Tensor, weight: Tensor, grid: GridTensors, levels: list[float],
    bias: Tensor | None, geometry: list[int], batch_factor: int,
) -> Tensor:  # fmt: skip
    """Return product((codes - zero) * step, weight on its grid) + bias.

    It has the memory format of `Geometry.layout`. Integers are used if they are exact here and pay for a batch of
    `batch_factor` times these codes; 0 means in float.
    """
    product, (step, zero) = Geometry.unpacked(geometry), qparams.tolist()
    if (
        batch_factor
        and product.integers_refusal(codes.shape, weight.shape, zero, batch_factor) is None
        and product.is_exact(weight.shape)
    ):
        scales, smallest = scales_of(grid)
        rounded, steps = torch.empty_like(weight, dtype=torch.int8), scales.new_empty(weight.shape[0])
        # Each row needs a step of its own, also if all rows share a scale: NaN there marks a NaN in the row.
        if scales.numel() < len(steps):
            scales, smallest = (own.reshape(-1).expand(len(steps)).contiguous() for own in (scales, smallest))
        quantize_rows(weight, scales, levels[0], levels[1], smallest, codes=rounded, steps=steps)
        y = product.multiply_integers(codes, step, zero, rounded, steps, bias)
        y = y.fill_(math.nan) if step != step else y  # a NaN of the input: integers lose it
    else:
        y = product.multiply(dequantize(codes, qparams), _values_on_grid(weight, grid, levels), bias)
    return to_layout(y, product.layout(codes, weight))


@operator(_codes_product_backward)
def codes_product_backward(
    grad: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, grid: GridTensors, levels: list[float],
    geometry: list[int], needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of the tensor behind the codes, of weight, scales and bias."""
    grad_x, grad_values, grad_bias = Geometry.unpacked(geometry).gradients(
        grad, dequantize(codes, qparams), _values_on_grid(weight, grid, levels), (needs_x, needs_weight, needs_bias)
    )
    grad_weight, grad_scales = grad.new_empty(0), grad.new_empty(0)
    if grad_values is not None:
        low, high, _, factor, relative = levels
        scales, smallest = scales_of(grid)
        grad_weight = in_layout_of(grad_values, weight)
        grad_scales = quantize_rows_backward(
            grad_weight, weight, scales, low, high, grad_weight, smallest, factor, relative
        )
    return (
        grad.new_empty(0) if grad_x is None else in_layout_of(grad_x, codes),
        grad_weight,
        grad_scales,
        grad.new_empty(0) if grad_bias is None else grad_bias,
    )


@operator(_input_scale_gradient)
def input_scale_gradient(
    grad: Tensor, x: Tensor, grid: GridTensors, levels: list[float], weight: Tensor,
    weight_grid: GridTensors, weight_levels: list[float], geometry: list[int],
) -> Tensor:  # fmt: skip
    """Return the gradient of an input's scale: sum(grad * product(dx/dscale, weight))."""
    learned, slopes = learned_grid(grid, levels), torch.empty_like(x)
    grad_scale = empty_scale(grid)
    addresses = elements_at("x", x, x), elements_at("slopes", slopes, x)
    compiled().step_slopes(*addresses, x.numel(), learned, threads_for(x.numel()))
    derivative = Geometry.unpacked(geometry).multiply(slopes, _values_on_grid(weight, weight_grid, weight_levels), None)
    grad, count = in_layout_of(grad, derivative), derivative.numel()
    compiled().gradient_by_slopes(
        elements_at("grad", grad, derivative), elements_at("derivative", derivative, derivative), count, learned,
        numbers_at("grad_scale", grad_scale, 1), threads_for(count),
    )  # fmt: skip
    return grad_scale


def _values_on_grid(weight: Tensor, grid: GridTensors, levels: list[float]) -> Tensor:
    values, (scales, smallest) = torch.empty_like(weight), scales_of(grid)
    quantize_rows(weight, scales, levels[0], levels[1], smallest, values=values)
    return values


class CodesProductFunction(torch.autograd.Function):
    """y = product((codes - zero) * step, lsq(weight)) + bias.

    Forward:    quantize the weight; multiply integers, or both operands in float
    Backward:   that of the product in float, its operands quantized again; then LSQ's for the weight and its scales
    """

    @staticmethod
    def forward(
        ctx: Context, carrier: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, scale: Tensor, smallest: Tensor,
        bias: Tensor | None, levels: Levels, geometry: Geometry, batch_factor: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(codes, qparams, weight, scale, smallest)
        ctx.levels, ctx.geometry = levels, geometry
        grid = [scale, smallest, None]
        y = codes_product(codes, qparams, weight, grid, levels, bias, geometry.packed(), batch_factor)
        return detached_view(y)

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (codes, qparams, weight, scale, smallest), needs = ctx.saved_tensors, ctx.needs_input_grad
        wanted = (needs[0], needs[3] or needs[4], needs[6])
        grad_x, grad_weight, grad_scale, grad_bias = codes_product_backward(
            grad, codes, qparams, weight, [scale, smallest, None], ctx.levels, ctx.geometry.packed(), *wanted
        )
        learned = (grad_weight if needs[3] else None, grad_scale if needs[4] else None, None)
        grad_bias = grad_bias if wanted[2] else None
        return grad_x if wanted[0] else None, None, None, *learned, grad_bias, None, None, None


class InputScaleFunction(torch.autograd.Function):
    """Returns a product as it is, and adds the gradient of its input's scale.

    Forward:    y
    Backward:   dy = grad;    dscale = sum(grad * product(dx/dscale, weight))

    The input itself needs no gradient. A product is linear, so the scale's derivative goes forward through it: one more
    product instead of the gradient of the input.
    """

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, weight: Tensor,
        weight_scale: Tensor, weight_smallest: Tensor, levels: Levels, weight_levels: Levels, geometry: Geometry,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, scale, smallest, zero_point, weight, weight_scale, weight_smallest)
        ctx.levels, ctx.weight_levels, ctx.geometry = levels, weight_levels, geometry
        return y * 1 if torch.compiler.is_compiling() else detached_view(y)  # compiled code may return no view here

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing hands every tensor out a single time
        x, *grid = saved[:4]
        weight, *weight_grid = saved[4:]
        grad_scale = input_scale_gradient(
            grad, x, grid, ctx.levels, weight, [*weight_grid, None], ctx.weight_levels, ctx.geometry.packed()
        )
        return grad, None, grad_scale, None, None, None, None, None, None, None, None


def multiply(
    layer: QuantLayer, x: Codes | Tensor, input_quantizer: Quantizer, *operands: Tensor | None, batch_factor: int = 1
) -> Tensor:
    """Return layer(x, *operands, input_quantizer=input_quantizer) without a norm.

    It runs on codes where kernels apply. Operands are weight and bias of a `QuantFunction`. Where x is a slice of a
    batch `batch_factor` times as large, the size of that batch decides whether integers pay.
    """
    weight, bias = _parameters(layer, operands)
    geometry = layer_geometry(layer)
    learned = _learned(weight, layer.weight_quantizer)
    if (
        not isinstance(x, Codes) or geometry is None or learned is None
        or not (bias is None or (is_plain(bias) and bias.dim() == 1))
        or (geometry.stride and x.dim() != len(geometry.stride) + 2)
    ):  # fmt: skip
        x = decode(x)
        values = weight_values(weight, layer.weight_quantizer) if passes_values(x) else None
        if values is not None:
            return layer.operate(x, values, bias)
        return layer.compute(x, weight, bias, input_quantizer, None)
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
    """Return why a layer cannot compute on codes, by its kind and its grid, or None."""
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
    return "its padding is not zero padding of a fixed size" if layer_geometry(layer) is None else None


def _grid_refusal(quantizer: Quantizer) -> str | None:
    spec = quantizer.spec
    if not (spec.symmetric and spec.signed):
        return f"its grid is {spec}, and kernels multiply by signed symmetric weights"
    if spec.granularity == "group":
        return "it has a scale per group of inputs, and kernels take one per row or one in all"
    return rule_refusal(quantizer) or mode_refusal(quantizer)


def weight_refusal(weight: Tensor) -> str | None:
    """Return why kernels do not take a weight, or None if they do."""
    if not is_plain(weight):
        return f"its weight is {weight.dtype} on {weight.device.type}, or of a subclass of torch.Tensor"
    if not weight.numel():
        return "its weight is empty"
    dense = weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last))
    return None if dense else "its weight is not contiguous"


def integers_refusal(layer: QuantLayer, x: torch.Size | None, weight: torch.Size, zero: float) -> str | None:
    """Return why a layer on codes multiplies in float, or None if in integers."""
    geometry = layer_geometry(layer)
    assert geometry is not None
    if not integers_allowed():
        return "float_products is on"
    reason = geometry.integers_refusal(x, weight, zero)
    if reason is not None:
        return reason
    return None if geometry.is_exact(weight) else "this processor multiplies such integers inexactly (it has no VNNI)"


def _parameters(layer: QuantLayer, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    if not isinstance(layer, QuantFunction):
        return layer.weight, layer.bias
    weight, *bias = operands
    assert weight is not None
    return weight, bias[0] if bias else None


def layer_geometry(layer: QuantLayer, kernel: Sequence[int] = ()) -> Geometry | None:
    """Return a layer's geometry, or None if its padding is not zeros of a fixed size."""
    if isinstance(layer, QuantFunction):
        axes = CONVOLUTIONS.index(layer.function) + 1 if layer.function in CONVOLUTIONS else 0
        return Geometry.of(axes, **layer.options, kernel=kernel) if axes else LINEAR
    if isinstance(layer, nn.Linear):
        return LINEAR
    assert isinstance(layer, AnyConvolution)
    if layer.padding_mode != "zeros":
        return None
    return Geometry.of(len(layer.stride), layer.stride, layer.padding, layer.dilation, layer.groups, layer.kernel_size)


def _learned(weight: Tensor, quantizer: Quantizer) -> Learned | None:
    if weight_refusal(weight) is not None:
        return None
    learned = learned_by(quantizer, weight, None)
    return learned if learned is not None and rows_of(weight, learned.scale) else None
