"""Operators that multiply the codes of a quantized tensor by a weight, which they quantize first.

`qparams` holds step and zero of the codes. low .. relative are fields of the weight's `Levels`, stride .. groups are
those of its `Geometry`. A gradient that is not needed comes back empty.
"""

import math

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import (
    compiled,
    dequantize,
    learned_grid,
    like,
    quantize_rows,
    quantize_rows_backward,
    step_and_zero,
    threads_for,
)
from qat.kernels.formulas import products as formulas
from qat.kernels.geometry import Geometry, arranged
from qat.kernels.operators.operator import operator


def _product(
    codes: Tensor, qparams: Tensor, weight: Tensor, scales: Tensor, smallest: Tensor, bias: Tensor | None, low: int,
    high: int, stride: list[int], padding: list[int], dilation: list[int], groups: int, copies: int,
) -> Tensor:  # fmt: skip
    geometry = Geometry(stride, padding, dilation, groups)
    y = geometry.multiply(codes.to(weight.dtype), weight, bias)
    return arranged(y, geometry.layout(codes, weight))


@operator(_product, formulas.codes_product)
def codes_product(
    codes: Tensor, qparams: Tensor, weight: Tensor, scales: Tensor, smallest: Tensor, bias: Tensor | None, low: int,
    high: int, stride: list[int], padding: list[int], dilation: list[int], groups: int, copies: int,
) -> Tensor:  # fmt: skip
    """product((codes - zero) * step, weight on its grid) + bias.

    In integers if they are exact here and pay for a batch of `copies` times these codes; copies = 0 means in float.
    """
    geometry, (step, zero) = Geometry(stride, padding, dilation, groups), step_and_zero(qparams)
    if (
        copies
        and geometry.pays_in_integers(codes.shape, weight.shape, zero, copies)
        and geometry.is_exact(weight.shape)
    ):
        rounded, steps = torch.empty_like(weight, dtype=torch.int8), scales.new_empty(weight.shape[0])
        # Each row needs a step of its own, also if all rows share a scale: NaN there marks a NaN in the row.
        if scales.numel() < len(steps):
            scales, smallest = (own.reshape(-1).expand(len(steps)).contiguous() for own in (scales, smallest))
        quantize_rows(weight, scales, low, high, smallest, codes=rounded, steps=steps)
        y = geometry.multiply_integers(codes, step, zero, rounded, steps, bias)
        y = y.fill_(math.nan) if step != step else y
    else:
        y = geometry.multiply(dequantize(codes, qparams), _on_grid(weight, scales, smallest, low, high), bias)
    return arranged(y, geometry.layout(codes, weight))


def _on_grid(weight: Tensor, scales: Tensor, smallest: Tensor, low: int, high: int) -> Tensor:
    values = torch.empty_like(weight)
    quantize_rows(weight, scales, low, high, smallest, values=values)
    return values


@operator(
    lambda grad, codes, qparams, weight, scales, smallest, *rest: (
        torch.empty_like(codes, dtype=grad.dtype) if rest[-3] else grad.new_empty(0),
        torch.empty_like(weight) if rest[-2] else grad.new_empty(0),
        torch.empty_like(scales) if rest[-2] else grad.new_empty(0),
        grad.new_empty(weight.shape[0] if rest[-1] else 0),
    ),
    formulas.codes_product_backward,
)  # fmt: skip
def codes_product_backward(
    grad: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, scales: Tensor, smallest: Tensor, low: int,
    high: int, factor: float, relative: bool, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the tensor behind the codes, of weight, scales and bias; the weight is quantized again."""
    grad_x, grad_values, grad_bias = Geometry(stride, padding, dilation, groups).gradients(
        grad, dequantize(codes, qparams), _on_grid(weight, scales, smallest, low, high),
        (needs_x, needs_weight, needs_bias),
    )  # fmt: skip
    grad_weight, grad_scales = grad.new_empty(0), grad.new_empty(0)
    if grad_values is not None:
        grad_weight = like(grad_values, weight)
        grad_scales = quantize_rows_backward(
            grad_weight, weight, scales, low, high, grad_weight, smallest, factor, relative
        )
    return (
        grad.new_empty(0) if grad_x is None else like(grad_x, codes),
        grad_weight,
        grad_scales,
        grad.new_empty(0) if grad_bias is None else grad_bias,
    )


@operator(lambda grad, x, scale, *rest: torch.empty_like(scale), formulas.input_scale_gradient)
def input_scale_gradient(
    grad: Tensor, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, low: int, high: int,
    shift: int, factor: float, relative: bool, weight: Tensor, weight_scales: Tensor, weight_smallest: Tensor,
    weight_low: int, weight_high: int, stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> Tensor:  # fmt: skip
    """sum(grad * product(dx/dscale, weight)): the gradient of the scale of x, an input of the model."""
    grid = learned_grid(scale, smallest, zero_point, low, high, shift, factor, relative)
    slopes, grad_scale = torch.empty_like(x), torch.empty_like(scale)
    addresses = elements_at("x", x, x), elements_at("slopes", slopes, x)
    compiled().step_slopes(*addresses, x.numel(), grid, threads_for(x.numel()))
    values = _on_grid(weight, weight_scales, weight_smallest, weight_low, weight_high)
    derivative = Geometry(stride, padding, dilation, groups).multiply(slopes, values, None)
    grad, count = like(grad, derivative), derivative.numel()
    compiled().gradient_by_slopes(
        elements_at("grad", grad, derivative), elements_at("derivative", derivative, derivative), count, grid,
        numbers_at("grad_scale", grad_scale, 1), threads_for(count),
    )  # fmt: skip
    return grad_scale
