"""Formulas for products of codes: with a weight, which they quantize first, and with codes; see `operators.products`.

    y = product(codes - zero, integers) * (step * steps) + bias, integers = clamp(round(weight / steps), low, high)

The operands of a product are these integers, not the values: integers up to 256 are exact in bfloat16 and in TF32,
which would round the values of a grid. float16 is the exception, see `_operands`.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from qat.kernels.formulas.grids import (
    grid_of,
    in_layout_of,
    integers_again,
    learned_gradient,
    result_dtype,
    slopes,
    slopes_on,
    step_in_force,
    without_autocast,
)
from qat.kernels.formulas.quantizers import dequantize
from qat.kernels.geometry import MOST_INPUTS, Geometry
from qat.torch_internals import int8_matmul

log = logging.getLogger("qat.kernels")


def codes_product(
    codes: Tensor, qparams: Tensor, weight: Tensor, grid: list[Any], levels: list[float], bias: Tensor | None,
    geometry: list[int], batch_factor: int,
) -> Tensor:  # fmt: skip
    """product((codes - zero) * step, weight on its grid) + bias, in autocast's dtype or else in weight's.

    The sums are exact in int32 if integers are allowed and this is a product of matrices that `fits_int_mm`, else in
    floating point. The result has the memory format of `Geometry.layout`.
    """
    product, dtype = Geometry.unpacked(geometry), result_dtype(codes, weight.dtype)
    rounded, steps = _on_grid(weight, grid, levels)
    rows = product.rows(codes.shape, weight.shape)
    fits = _is_of_matrices(product, weight) and fits_int_mm(rows, weight.shape[1], weight.shape[0])
    if batch_factor and fits and has_int_mm(codes.device):
        y = _multiply_integers(codes, qparams[1], rounded, rows)
        # int8 has no NaN: the factor of a row brings back a NaN in its weights.
        factor = steps * qparams[0] + (rounded - rounded).flatten(1).sum(1)
    else:
        x, values, factor = _operands(codes, qparams, rounded, steps, dtype)
        with without_autocast(codes):
            y = product.multiply(x, values, None)
    y = y * _along_channels(factor, product)
    if bias is not None:
        y = y + _along_channels(bias.to(torch.float32), product)
    return _in_layout(y, product.layout(codes, weight), dtype)


def codes_product_backward(
    grad: Tensor, codes: Tensor, qparams: Tensor, weight: Tensor, grid: list[Any], levels: list[float],
    geometry: list[int], needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the tensor behind the codes, of weight, scales and bias.

    dx: the gradient of the product with the weight's values, in grad's dtype
    dvalues: the gradient of the product with the integers of the codes, times step in float32;  then LSQ's, per row:
        dweight = dvalues inside the grid;  dscales = factor * sum(dvalues * slope), in their own dtypes
    dbias = sum(grad) in float32, in weight's dtype
    """
    product = Geometry.unpacked(geometry)
    rounded, steps = _on_grid(weight, grid, levels)
    values = (rounded * _along_rows(steps, weight)).to(grad.dtype)
    x, left = _integers(codes, qparams, grad.dtype)
    with without_autocast(grad):
        found_x, found_values = _gradients(product, grad, x, values, needs_x, needs_weight)
    grad_x, grad_weight, grad_scales, grad_bias = (grad.new_empty(0) for _ in range(4))
    if found_x is not None:
        grad_x = in_layout_of(found_x, codes, grad.dtype)
    if found_values is not None:
        through = found_values.to(torch.float32) * left
        inside, slope = slopes(weight.to(torch.float32) / _along_rows(steps, weight), levels[0], levels[1])
        grad_weight = in_layout_of(torch.where(inside, through, 0.0), weight, weight.dtype)
        total = (through * slope).flatten(1).sum(1)
        total = total if grid[0].numel() > 1 else total.sum()
        grad_scales = learned_gradient(total, grid, levels)
    if needs_bias:
        axes = [0, *range(2, grad.dim())] if product.stride else list(range(grad.dim() - 1))
        grad_bias = grad.sum(axes, dtype=torch.float32).to(weight.dtype)
    return grad_x, grad_weight, grad_scales, grad_bias


def input_scale_gradient(
    grad: Tensor, x: Tensor, grid: list[Any], levels: list[float], weight: Tensor, weight_grid: list[Any],
    weight_levels: list[float], geometry: list[int],
) -> Tensor:  # fmt: skip
    """sum(grad * product(dx/dscale, weight)): the product in grad's dtype, its sum with grad in float32."""
    _, slope = slopes_on(x.to(torch.float32), grid_of(grid, levels))
    rounded, steps = _on_grid(weight, weight_grid, weight_levels)
    values = (rounded * _along_rows(steps, weight)).to(grad.dtype)
    with without_autocast(grad):
        derivative = Geometry.unpacked(geometry).multiply(slope.to(grad.dtype), values, None)
    total = (grad.to(torch.float32) * derivative.to(torch.float32)).sum()
    return learned_gradient(total, grid, levels)


def codes_matmul(a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor) -> Tensor:
    """((a - a_zero) @ (b - b_zero)) * (a_step * b_step), in float32 or in autocast's dtype.

    The integers are multiplied, which bfloat16 and TF32 hold exactly. In float16 the values are multiplied instead:
    sums of integers overflow beyond 65504, and the values' sums are no larger than in any model in float16.
    """
    dtype = result_dtype(a, torch.float32)
    with without_autocast(a):
        if dtype is torch.float16:
            y = torch.bmm(_rows(dequantize(a, a_qparams), dtype), _rows(dequantize(b, b_qparams), dtype))
        else:
            x, z = (codes - qparams[1].to(dtype) for codes, qparams in ((a, a_qparams), (b, b_qparams)))
            y = (torch.bmm(_rows(x, dtype), _rows(z, dtype)) * (a_qparams[:1] * b_qparams[:1])).to(dtype)
    return y.view(*a.shape[:-1], b.shape[-1])


def codes_matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
) -> tuple[Tensor, Tensor]:
    """da = grad @ b^T;  db = a^T @ grad, with values in grad's dtype; each in the strides of its operand."""
    rows = grad.reshape(-1, *grad.shape[-2:])
    x, z = (
        _rows(integers_again(codes, qparams[1]) * qparams[0], grad.dtype)
        for codes, qparams in ((a, a_qparams), (b, b_qparams))
    )
    with without_autocast(grad):
        grad_a, grad_b = torch.bmm(rows, z.mT), torch.bmm(x.mT, rows)
    return in_layout_of(grad_a.view(a.shape), a, grad.dtype), in_layout_of(grad_b.view(b.shape), b, grad.dtype)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, as a batch of matrices: three axes."""
    return x.to(dtype).flatten(0, -3)


def fits_int_mm(rows: int, inputs: int, outputs: int) -> bool:
    """Whether `int8_matmul` takes (rows, inputs) @ (inputs, outputs) on CUDA, whose libraries require these sizes.

    The first matrix has to be in row order, the second in column order, as a layer's input and weight are. The rule is
    the same for all devices, so that they compute alike.
    """
    return rows > 16 and 0 < inputs <= MOST_INPUTS and inputs % 8 == 0 and outputs > 0 and outputs % 8 == 0


TRIED = ((48, 256, 64), (17, 8, 16), (77, 4104, 40))
"""Rows, inputs and outputs that `try_int_mm` multiplies: whole tiles, the smallest sizes, and partial tiles."""

_int_mm_found: dict[str, bool] = {}
"""The results of `try_int_mm`, by kind of device."""


def has_int_mm(device: torch.device) -> bool:
    """Whether `try_int_mm` found `int8_matmul` exact on this kind of device; False if it was not tried."""
    return _int_mm_found.get(device.type, False)


def try_int_mm(device: torch.device) -> bool:
    """Try `int8_matmul` on a device, extremes included: once, and before anything is compiled or captured."""
    if device.type not in _int_mm_found:
        try:
            found, reason = all(_is_exact(device, *sizes) for sizes in TRIED), "wrong"
        except Exception as error:  # an older device or another build of torch; floating point works in any case
            found, reason = False, f"{type(error).__name__}: {error}".splitlines()[0]
        _int_mm_found[device.type] = found
        if not _int_mm_found[device.type]:
            log.info("integer matrix products on %s: %s; training multiplies in floating numbers", device, reason)
    return _int_mm_found[device.type]


def _is_exact(device: torch.device, rows: int, inputs: int, outputs: int) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    a = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8, generator=generator, device="cpu")
    b = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=generator, device="cpu")
    a[:16], b[:8], b[8:16] = 127, 127, -127
    y = int8_matmul(a.to(device), b.to(device).T).cpu()
    return torch.equal(y, (a.double() @ b.double().T).to(torch.int32))


def integer_sums(codes: Tensor, zero: float, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """sum((codes - zero) * weight) in int32, of an int8 weight; None where `int8_matmul` does not compute it."""
    if not _is_of_matrices(geometry, weight) or weight.dim() not in (2, codes.dim()):
        return None
    rows = geometry.rows(codes.shape, weight.shape)
    fits = fits_int_mm(rows, weight.shape[1], weight.shape[0]) and try_int_mm(codes.device)
    return _multiply_integers(codes, torch.tensor(zero), weight, rows) if fits else None


def _is_of_matrices(geometry: Geometry, weight: Tensor) -> bool:
    """Whether this is a linear layer, or a 1x1 convolution that acts as one at every pixel."""
    stride, padding, _, groups = geometry
    return groups == 1 and all(n == 1 for n in (*stride, *weight.shape[2:])) and all(n == 0 for n in padding)


def _multiply_integers(codes: Tensor, zero: Tensor, rounded: Tensor, rows: int) -> Tensor:
    """product(codes - zero, integers) in int32, with the channels on the axis where the result has them.

    (codes - zero) @ w = (codes - 128) @ w + (128 - zero) * sum(w), because both operands have to be int8.
    """
    inner = codes.movedim(1, -1) if rounded.dim() > 2 else codes
    matrix = inner.reshape(rows, -1).bitwise_xor(128).view(torch.int8)  # codes - 128, bit by bit
    integers = rounded.flatten(1).to(torch.int8).contiguous()
    correction = (128.0 - zero).to(torch.int32) * integers.sum(1, dtype=torch.int32)
    y = int8_matmul(matrix, integers.T).add_(correction).view(*inner.shape[:-1], -1)
    return y.movedim(-1, 1) if rounded.dim() > 2 else y


def _operands(
    codes: Tensor, qparams: Tensor, rounded: Tensor, steps: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands of a product in floating point, and the factor for the result: one number, or one per row.

    Sums of integers overflow float16, which ends at 65504: three products of 255 by 127 do. There the weight's values
    are the operand, and the sums are 1 / step times the result.
    """
    x = codes - qparams[1].to(dtype)
    if dtype is torch.float16:
        return x, (rounded * _along_rows(steps, rounded)).to(dtype), qparams[:1]
    return x, rounded.to(dtype), steps * qparams[0]


def _integers(codes: Tensor, qparams: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The operand for the weight's gradient, and the factor for the result.

    These are codes - zero, and step. In float16 they are the values, and 1: a loss scale brings gradients near 65504,
    which leaves no room for a factor of 255.
    """
    if dtype is torch.float16:
        return (integers_again(codes, qparams[1]) * qparams[0]).to(dtype), torch.ones_like(qparams[0])
    return integers_again(codes, qparams[1].to(dtype)), qparams[0]


def _gradients(
    geometry: Geometry, grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight, None where not needed."""
    if geometry.stride:
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False,
            [0] * len(geometry.stride), geometry.groups, [needs_x, needs_weight, False],
        )  # fmt: skip
        return found[0], found[1]
    rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return (rows @ weight).view(x.shape) if needs_x else None, rows.T @ inputs if needs_weight else None


def _on_grid(weight: Tensor, grid: list[Any], levels: list[float]) -> tuple[Tensor, Tensor]:
    """The weight's integers in float32, and the bounded scales: one, or one per row."""
    steps = step_in_force(grid[0], grid[1].reshape(grid[0].shape)).reshape(-1)
    return (weight.to(torch.float32) / _along_rows(steps, weight)).round_().clamp_(levels[0], levels[1]), steps


def _along_rows(steps: Tensor, weight: Tensor) -> Tensor:
    return steps.view(-1, *[1] * (weight.dim() - 1))


def _along_channels(values: Tensor, geometry: Geometry) -> Tensor:
    return values.view(-1, *[1] * len(geometry.stride))


def _in_layout(y: Tensor, layout: torch.memory_format, dtype: torch.dtype) -> Tensor:
    """y in a memory format and a dtype.

    A Function's forward must not end with an in-place operation or one that returns its input: torch 2.11 compiles such
    a Function without its gradient.
    """
    if y.dtype is not dtype:
        return y.to(dtype, memory_format=layout)
    return y if y.is_contiguous(memory_format=layout) else y.contiguous(memory_format=layout)
