"""Formulas for products of codes: with a weight, which they quantize first, and with codes; see `operators.products`.

y = product((codes - zero) * step, integers * steps) + bias, integers = clamp(round(weight / steps), low, high)
"""

from typing import Any

import torch
from torch import Tensor

from qat.kernels.cpu.quantizers import in_layout_of
from qat.kernels.formulas.grids import grid_of, learned_gradient, slopes, slopes_on, step_in_force
from qat.kernels.formulas.quantizers import dequantize
from qat.kernels.geometry import Geometry


def codes_product(
    codes: Tensor, qparams: Tensor, weight: Tensor, grid: list[Any], levels: list[float], bias: Tensor | None,
    geometry: list[int], batch_factor: int,
) -> Tensor:  # fmt: skip
    """product((codes - zero) * step, weight on its grid) + bias, in the memory format of `Geometry.layout`."""
    product = Geometry.unpacked(geometry)
    y = product.multiply(dequantize(codes, qparams), _on_grid(weight, grid, levels)[0], bias)
    return y.contiguous(memory_format=product.layout(codes, weight))


def codes_product_backward(
    grad: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, grid: list[Any], levels: list[float],
    geometry: list[int], needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the tensor behind the codes, of weight, scales and bias.

    dvalues: the gradient of the weight on its grid;  then LSQ's, per row:
        dweight = dvalues inside the grid;  dscales = factor * sum(dvalues * slope)
    """
    values, v = _on_grid(weight, grid, levels)
    found = Geometry.unpacked(geometry).gradients(
        grad, dequantize(codes, qparams), values, (needs_x, needs_weight, needs_bias)
    )
    grad_x, grad_weight, grad_bias = (grad.new_empty(0) if each is None else each for each in found)
    grad_scales = grad.new_empty(0)
    if needs_weight:
        inside, slope = slopes(v, levels[0], levels[1])
        total = (grad_weight * slope).flatten(1).sum(1)
        grad_scales = learned_gradient(total if grid[0].numel() > 1 else total.sum(), grid, levels)
        grad_weight = in_layout_of(torch.where(inside, grad_weight, 0.0), weight)
    return in_layout_of(grad_x, codes) if needs_x else grad_x, grad_weight, grad_scales, grad_bias


def input_scale_gradient(
    grad: Tensor, x: Tensor, grid: list[Any], levels: list[float], weight: Tensor, weight_grid: list[Any],
    weight_levels: list[float], geometry: list[int],
) -> Tensor:  # fmt: skip
    """sum(grad * product(dx/dscale, weight))."""
    _, slope = slopes_on(x, grid_of(grid, levels))
    values, _ = _on_grid(weight, weight_grid, weight_levels)
    return learned_gradient((grad * Geometry.unpacked(geometry).multiply(slope, values, None)).sum(), grid, levels)


def codes_matmul(a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor) -> Tensor:
    """((a - a_zero) * a_step) @ ((b - b_zero) * b_step)."""
    return torch.matmul(dequantize(a, a_qparams), dequantize(b, b_qparams))


def codes_matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
) -> tuple[Tensor, Tensor]:
    """da = grad @ b^T;  db = a^T @ grad; each in the strides of its operand."""
    grad_a = torch.matmul(grad, dequantize(b, b_qparams).mT)
    return in_layout_of(grad_a, a), in_layout_of(torch.matmul(dequantize(a, a_qparams).mT, grad), b)


def _on_grid(weight: Tensor, grid: list[Any], levels: list[float]) -> tuple[Tensor, Tensor]:
    """The weight on its grid of one scale, or one per row, and weight / scale."""
    steps = step_in_force(grid[0], grid[1].reshape(grid[0].shape)).reshape(-1, *[1] * (weight.dim() - 1))
    v = weight / steps
    return torch.round(v).clamp(levels[0], levels[1]) * steps, v
