"""Operators that multiply codes: by a weight, which they quantize first, or by codes; see `operator` for arguments.

The grid of a weight holds its scales (one, or one for each row), their smallest values, and None.
"""

import math
from typing import Any

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import (
    compiled,
    dequantize,
    empty_scale,
    in_layout_of,
    learned_grid,
    quantize_rows,
    quantize_rows_backward,
    threads_for,
)
from qat.kernels.formulas import products as formulas
from qat.kernels.geometry import Geometry, to_layout
from qat.kernels.operators.operator import operator


@operator(formulas.codes_product)
def codes_product(
    codes: Tensor, qparams: Tensor, weight: Tensor, grid: list[Tensor | None], levels: list[float],
    bias: Tensor | None, geometry: list[int], batch_factor: int,
) -> Tensor:  # fmt: skip
    """product((codes - zero) * step, weight on its grid) + bias.

    In integers if they are exact here and pay for a batch of `batch_factor` times these codes; 0 means in float.
    """
    product, (step, zero) = Geometry.unpacked(geometry), qparams.tolist()
    if (
        batch_factor
        and product.integers_refusal(codes.shape, weight.shape, zero, batch_factor) is None
        and product.is_exact(weight.shape)
    ):
        scales, smallest = _scales(grid)
        rounded, steps = torch.empty_like(weight, dtype=torch.int8), scales.new_empty(weight.shape[0])
        # Each row needs a step of its own, also if all rows share a scale: NaN there marks a NaN in the row.
        if scales.numel() < len(steps):
            scales, smallest = (own.reshape(-1).expand(len(steps)).contiguous() for own in (scales, smallest))
        quantize_rows(weight, scales, levels[0], levels[1], smallest, codes=rounded, steps=steps)
        y = product.multiply_integers(codes, step, zero, rounded, steps, bias)
        y = y.fill_(math.nan) if step != step else y
    else:
        y = product.multiply(dequantize(codes, qparams), _on_grid(weight, grid, levels), bias)
    return to_layout(y, product.layout(codes, weight))


def _scales(grid: list[Any]) -> tuple[Tensor, Tensor]:
    return grid[0], grid[1]


def _on_grid(weight: Tensor, grid: list[Tensor | None], levels: list[float]) -> Tensor:
    values, (scales, smallest) = torch.empty_like(weight), _scales(grid)
    quantize_rows(weight, scales, levels[0], levels[1], smallest, values=values)
    return values


@operator(formulas.codes_product_backward)
def codes_product_backward(
    grad: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, grid: list[Tensor | None], levels: list[float],
    geometry: list[int], needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the tensor behind the codes, of weight, scales and bias; the weight is quantized again."""
    grad_x, grad_values, grad_bias = Geometry.unpacked(geometry).gradients(
        grad, dequantize(codes, qparams), _on_grid(weight, grid, levels), (needs_x, needs_weight, needs_bias)
    )
    grad_weight, grad_scales = grad.new_empty(0), grad.new_empty(0)
    if grad_values is not None:
        low, high, _, factor, relative = levels
        scales, smallest = _scales(grid)
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


@operator(formulas.input_scale_gradient)
def input_scale_gradient(
    grad: Tensor, x: Tensor, grid: list[Tensor | None], levels: list[float], weight: Tensor,
    weight_grid: list[Tensor | None], weight_levels: list[float], geometry: list[int],
) -> Tensor:  # fmt: skip
    """sum(grad * product(dx/dscale, weight)): the gradient of the scale of x, an input of the model."""
    learned, slopes = learned_grid(grid, levels), torch.empty_like(x)
    grad_scale = empty_scale(grid)
    addresses = elements_at("x", x, x), elements_at("slopes", slopes, x)
    compiled().step_slopes(*addresses, x.numel(), learned, threads_for(x.numel()))
    derivative = Geometry.unpacked(geometry).multiply(slopes, _on_grid(weight, weight_grid, weight_levels), None)
    grad, count = in_layout_of(grad, derivative), derivative.numel()
    compiled().gradient_by_slopes(
        elements_at("grad", grad, derivative), elements_at("derivative", derivative, derivative), count, learned,
        numbers_at("grad_scale", grad_scale, 1), threads_for(count),
    )  # fmt: skip
    return grad_scale


@operator(formulas.codes_matmul)
def codes_matmul(a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor) -> Tensor:
    """a @ b of codes (..., L, E) and (..., E, S), both made `dense_matrices`, in float32."""
    y = torch.bmm(_matrices(a, a_qparams), _matrices(b, b_qparams))
    return y.view(*a.shape[:-1], b.shape[-1])


@operator(formulas.codes_matmul_backward)
def codes_matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of both operands, in their strides."""
    rows = grad.reshape(-1, *grad.shape[-2:])
    grad_a = torch.bmm(rows, _matrices(b, b_qparams).mT)
    x = _matrices(a, a_qparams)
    grad_b = torch.bmm(x.mT, rows) if b.is_contiguous() else torch.bmm(rows.mT, x).mT
    return in_layout_of(grad_a.view(a.shape), a), in_layout_of(grad_b.reshape(b.shape), b)


def dense_matrices(codes: Tensor) -> Tensor:
    """The same codes as dense matrices one after the other; each stays in row or column order."""
    if codes.stride(-2) == 1 < codes.stride(-1):
        return codes.mT.contiguous().mT
    return codes.contiguous()


def _matrices(codes: Tensor, qparams: Tensor) -> Tensor:
    """The values of codes as matrices: three axes, in float32."""
    turned = not codes.is_contiguous()
    x = dequantize(codes.mT if turned else codes, qparams).flatten(0, -3)
    return x.mT if turned else x
