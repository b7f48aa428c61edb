"""Operators that quantize in one pass: a tensor, the sum of two quantized ones, or what a BatchNorm and a clamp make of
one; see `operator` for their arguments."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import elements_at, numbers_at
from qat.kernels.cpu.quantizers import compiled, empty_scale, in_layout_of, learned_grid, threads_for
from qat.kernels.cpu.structures import Extent, Norm, Operand
from qat.kernels.formulas import quantizers as formulas
from qat.kernels.operators.operator import operator


def _operand(codes: Tensor, qparams: Tensor, pattern: Tensor) -> Operand:
    return Operand(
        elements_at("an operand's codes", codes, pattern, torch.uint8), numbers_at("step and zero", qparams, 2)
    )


@operator(formulas.quantize_codes)
def quantize_codes(x: Tensor, grid: list[Tensor | None], levels: list[float]) -> tuple[Tensor, Tensor]:
    """codes = clamp(round(x / step) + zero_point, low, high) + shift, and their qparams."""
    codes, qparams = torch.empty_like(x, dtype=torch.uint8), torch.empty(2, dtype=torch.float32)
    compiled().quantize_codes(
        elements_at("x", x, x), elements_at("codes", codes, x, torch.uint8), x.numel(), learned_grid(grid, levels),
        numbers_at("step and zero", qparams, 2), threads_for(x.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(formulas.quantize_codes_backward)
def quantize_codes_backward(
    grad: Tensor, x: Tensor, grid: list[Tensor | None], levels: list[float], needs_x: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x and scale."""
    grad, grad_x = in_layout_of(grad, x), torch.empty_like(x) if needs_x else x.new_empty(0)
    grad_scale = empty_scale(grid)
    compiled().quantize_codes_backward(
        elements_at("grad", grad, x), elements_at("x", x, x), elements_at("grad_x", grad_x, x) if needs_x else None,
        x.numel(), learned_grid(grid, levels), numbers_at("grad_scale", grad_scale, 1), threads_for(x.numel()),
    )  # fmt: skip
    return grad_x, grad_scale


@operator(formulas.add_quantize)
def add_quantize(
    a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float], grid: list[Tensor | None],
    levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of clamp(a + b, *clip), where a and b are codes with the same strides, and their qparams."""
    codes, qparams = torch.empty_like(a), torch.empty(2, dtype=torch.float32)
    compiled().add_quantize(
        _operand(a, a_qparams, a), _operand(b, b_qparams, a), elements_at("codes", codes, a, torch.uint8), a.numel(),
        learned_grid(grid, levels), *clip, numbers_at("step and zero", qparams, 2), threads_for(a.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(formulas.add_quantize_backward)
def add_quantize_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor, clip: list[float],
    grid: list[Tensor | None], levels: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the sum, which is the gradient of both operands, and that of scale."""
    grad = in_layout_of(grad, a)
    grad_sum, grad_scale = torch.empty_like(grad), empty_scale(grid)
    compiled().add_quantize_backward(
        elements_at("grad", grad, a), _operand(a, a_qparams, a), _operand(b, b_qparams, a),
        elements_at("grad_sum", grad_sum, a), a.numel(), learned_grid(grid, levels), *clip,
        numbers_at("grad_scale", grad_scale, 1), threads_for(a.numel()),
    )  # fmt: skip
    return grad_sum, grad_scale


def sizes_of(y: Tensor) -> tuple[int, int, int] | None:
    """The fields of `Extent`: where the channels lie in memory; None if they are neither outermost nor innermost."""
    if y.dim() < 4:
        return (y.numel() // y.shape[-1], y.shape[-1], 1) if y.is_contiguous() else None
    channels = y.shape[1]
    if y.is_contiguous():
        return y.shape[0], channels, y.numel() // (y.shape[0] * channels)
    nearest = torch.channels_last if y.dim() == 4 else torch.channels_last_3d
    return (y.numel() // channels, channels, 1) if y.is_contiguous(memory_format=nearest) else None


def _extent_of(y: Tensor) -> Extent:
    """The extent of a tensor that has one."""
    sizes = sizes_of(y)
    assert sizes is not None
    return Extent(*sizes)


def _addresses(norm: list[Tensor], extent: Extent) -> Norm:
    names = ("gamma", "beta", "mean", "inverse")
    return Norm(*[numbers_at(name, each, extent.channels) for name, each in zip(names, norm, strict=True)])


def statistics(y: Tensor, eps: float, running: tuple[Tensor, Tensor], share: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of every channel, summed in float64.

    The running mean and variance are moved in place towards the batch's mean and unbiased variance by `share`.
    """
    mean, inverse, _ = _statistics(y, eps, running, share)
    return mean, inverse


def _statistics(y: Tensor, eps: float, running: Sequence[Tensor], share: float) -> tuple[Tensor, Tensor, Tensor]:
    extent = _extent_of(y)
    mean, inverse, variance = (y.new_empty(extent.channels) for _ in range(3))
    written = [numbers_at("statistics", each, extent.channels) for each in (mean, inverse, variance)]
    names = ("running_mean", "running_var")
    moved = [numbers_at(name, each, extent.channels) for name, each in zip(names, running, strict=False)]
    compiled().statistics(
        elements_at("y", y, y), extent, eps, *written, *(moved or (None, None)), share, threads_for(y.numel())
    )
    return mean, inverse, variance


@operator(formulas.batch_statistics)
def batch_statistics(y: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of every channel, 1 / sqrt(variance + eps), and the unbiased variance."""
    return _statistics(y, eps, (), 0.0)


@operator(formulas.norm_quantize)
def norm_quantize(
    y: Tensor, norm: list[Tensor], clip: list[float], grid: list[Tensor | None], levels: list[float]
) -> tuple[Tensor, Tensor]:
    """Codes of clamp((y - mean) * inverse * gamma + beta, *clip), and qparams; norm: gamma, beta, mean, inverse."""
    codes, qparams, extent = torch.empty_like(y, dtype=torch.uint8), y.new_empty(2), _extent_of(y)
    compiled().norm_quantize(
        elements_at("y", y, y), elements_at("codes", codes, y, torch.uint8), extent, _addresses(norm, extent),
        learned_grid(grid, levels), *clip, numbers_at("step and zero", qparams, 2), threads_for(y.numel()),
    )  # fmt: skip
    return codes, qparams


@operator(formulas.norm_quantize_backward)
def norm_quantize_backward(
    grad: Tensor, y: Tensor, norm: list[Tensor], clip: list[float], grid: list[Tensor | None], levels: list[float],
    follows_batch: bool, needs_y: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of y, gamma, beta and scale; follows_batch: mean and inverse are statistics of y."""
    grad, grad_y = in_layout_of(grad, y), torch.empty_like(y) if needs_y else y.new_empty(0)
    grad_gamma, grad_beta = torch.empty_like(norm[0]), torch.empty_like(norm[0])
    grad_scale, extent = empty_scale(grid), _extent_of(y)
    compiled().norm_quantize_backward(
        elements_at("grad", grad, y), elements_at("y", y, y), elements_at("grad_y", grad_y, y) if needs_y else None,
        extent, _addresses(norm, extent), learned_grid(grid, levels), *clip, follows_batch,
        numbers_at("grad_gamma", grad_gamma, extent.channels), numbers_at("grad_beta", grad_beta, extent.channels),
        numbers_at("grad_scale", grad_scale, 1), threads_for(y.numel()),
    )  # fmt: skip
    return grad_y, grad_gamma, grad_beta, grad_scale
