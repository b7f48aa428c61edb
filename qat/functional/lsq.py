"""LSQ and LSQ+: integer grids with a learned step, symmetric or affine."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.tensors import (
    STEFunction,
    apply,
    as_dtype,
    check_bounds,
    require_floating,
    scaled,
    sum_to_shape,
    widened,
)
from qat.kernels import choose


class LSQFunction(STEFunction):
    """Round onto an integer grid whose step is learned.

    Forward, with v = x / scale:    y = scale * clamp(round(v), qmin, qmax)
    Backward:    dy/dx     = 1             where qmin <= v <= qmax, else 0
                 dy/dscale = round(v) - v  there, else clamp(v, qmin, qmax); times grad_factor

    The mask is taken on the unrounded v and a value exactly on a bound counts as inside: the paper's strict
    inequality would mask the largest weight of every min-max-initialised channel.
    """

    @staticmethod
    def forward(x: Tensor, scale: Tensor, qmin: int, qmax: int, grad_factor: float) -> Tensor:
        kernels = choose(x, scale)
        if kernels is not None:
            return kernels.quantize(x, scale, None, qmin, qmax)
        value, step = widened(x, scale)  # in bfloat16 arithmetic 6-11 % of 8-bit values land on the wrong level
        return as_dtype(torch.clamp(torch.round(value / step), qmin, qmax).mul(step), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, scale = ctx.saved_tensors
        qmin, qmax, grad_factor = ctx.options
        kernels = None if torch.is_grad_enabled() else choose(x, scale)  # kernels have no derivative themselves
        if kernels is not None:
            needs = ctx.needs_input_grad[:2]
            grad_x, grad_scale, _ = kernels.gradients(grad, x, scale, None, qmin, qmax, (*needs, False))
            return grad_x, scaled(grad_scale, grad_factor, scale), None, None, None
        value, step = widened(x, scale)
        v = (value / step).detach()  # residuals and bounds count as constants
        bounded = torch.clamp(v, qmin, qmax)
        inside = bounded == v
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(inside, grad, 0)
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, torch.round(v) - v, bounded)
            grad_scale = sum_to_shape(grad.to(v.dtype) * slope, scale.shape).mul(grad_factor).to(scale.dtype)
        return grad_x, grad_scale, None, None, None


def lsq_quantize(x: Tensor, scale: Tensor, qmin: int, qmax: int, grad_factor: float = 1.0) -> Tensor:
    """Put x on the grid scale * {qmin .. qmax}, with LSQ's gradients for x and scale.

    y = scale * clamp(round(x / scale), qmin, qmax); the gradients are those of `LSQFunction`. The paper's grad_factor
    is 1/sqrt(N*qmax).

    Source: Esser et al., arXiv:1902.08153. Deviation: a value exactly on a bound counts as inside.

    >>> x = torch.tensor([0.26, -9.0, 0.5], requires_grad=True)
    >>> scale = torch.tensor(0.5, requires_grad=True)
    >>> y = lsq_quantize(x, scale, -8, 7)
    >>> y.tolist()
    [0.5, -4.0, 0.5]
    >>> y.sum().backward()
    >>> x.grad.tolist(), round(scale.grad.item(), 2)
    ([1.0, 0.0, 1.0], -7.52)
    """
    check_bounds(qmin, qmax, "lsq_quantize")
    return apply(LSQFunction, require_floating(x, "lsq_quantize"), scale, qmin, qmax, grad_factor)


class LSQPlusFunction(STEFunction):
    """Round onto an affine integer grid whose step and zero point are learned.

    Forward, with v = x / scale and z = clamp(round(zero_point), qmin, qmax):
                 y = scale * (clamp(round(v) + z, qmin, qmax) - z)
    Backward:    dy/dx          = 1             where qmin <= v + z <= qmax, else 0
                 dy/dscale      = round(v) - v  there, else clamp(v, qmin - z, qmax - z); times grad_factor
                 dy/dzero_point = 0             there, else -scale; times grad_factor

    The zero point acts as an integer of the grid, so that 0.0 is exact (zero padding) and the exported zero point
    is the trained one; the rounding passes its gradient straight through.
    """

    @staticmethod
    def forward(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, grad_factor: float) -> Tensor:
        kernels = choose(x, scale, zero_point)
        if kernels is not None:
            return kernels.quantize(x, scale, zero_point, qmin, qmax)
        value, step, zero = widened(x, scale, zero_point)
        zero = torch.clamp(torch.round(zero), qmin, qmax)
        codes = torch.clamp(torch.round(value / step) + zero, qmin, qmax)  # rounded first, as ONNX QuantizeLinear does
        return as_dtype((codes - zero).mul(step), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, scale, zero_point = ctx.saved_tensors
        qmin, qmax, grad_factor = ctx.options
        kernels = None if torch.is_grad_enabled() else choose(x, scale, zero_point)  # they have no derivative
        if kernels is not None:
            needs = ctx.needs_input_grad[:3]
            grad_x, grad_scale, grad_zero = kernels.gradients(grad, x, scale, zero_point, qmin, qmax, needs)
            grad_scale, grad_zero = scaled(grad_scale, grad_factor, scale), scaled(grad_zero, grad_factor, zero_point)
            return grad_x, grad_scale, grad_zero, None, None, None
        value, step, zero, upstream = widened(x, scale, zero_point, grad)
        zero = torch.clamp(torch.round(zero), qmin, qmax)
        v = (value / step).detach()  # residuals and bounds count as constants
        bounded = torch.minimum(torch.maximum(v, qmin - zero), qmax - zero)
        inside = bounded == v
        # 0, with zero_point's derivative straight through round and clamp.
        straight = torch.where(zero_point.isfinite(), zero_point - zero_point.detach(), 0).to(v.dtype)
        grad_x = grad_scale = grad_zero = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(inside, grad, 0)
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, torch.round(v) - v, bounded - straight)
            grad_scale = sum_to_shape(upstream * slope, scale.shape).mul(grad_factor).to(scale.dtype)
        if ctx.needs_input_grad[2]:
            slope = torch.where(inside, 0, -step)
            grad_zero = sum_to_shape(upstream * slope, zero_point.shape).mul(grad_factor).to(zero_point.dtype)
        return grad_x, grad_scale, grad_zero, None, None, None


def lsq_plus_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, grad_factor: float = 1.0
) -> Tensor:
    """Put x on the affine grid of scale and zero_point, with gradients for all three.

    y = scale * (clamp(round(x / scale) + z, qmin, qmax) - z) with z = clamp(round(zero_point), qmin, qmax); the
    gradients are those of `LSQPlusFunction`.

    Args:
        zero_point: the integer that stands for 0.0, as a floating-point tensor; shape as scale.

    Source: Bhalgat et al., "LSQ+", arXiv:2004.09576, whose float offset is -scale * zero_point here.

    >>> x = torch.tensor([-1.0, 0.0, 9.0])
    >>> lsq_plus_quantize(x, torch.tensor(0.5), torch.tensor(3.0), 0, 15).tolist()
    [-1.0, 0.0, 6.0]
    """
    check_bounds(qmin, qmax, "lsq_plus_quantize")
    return apply(LSQPlusFunction, require_floating(x, "lsq_plus_quantize"), scale, zero_point, qmin, qmax, grad_factor)


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """Put x on a given affine grid; only x gets a gradient, 1 inside, 0 outside.

    zero_point is the integer that stands for 0.0, of any dtype, shape as scale.

    Source: Jacob et al., arXiv:1712.05877. Deviation from `torch.fake_quantize_per_tensor_affine`, whose gradient
    is masked on the rounded value: here the unrounded one decides, as in LSQ.

    >>> fake_quantize(torch.tensor([0.3, 200.0]), torch.tensor(0.5), torch.tensor(0), 0, 255).tolist()
    [0.5, 127.5]
    """
    check_bounds(qmin, qmax, "fake_quantize")
    require_floating(x, "fake_quantize")
    return apply(LSQPlusFunction, x, scale.detach(), zero_point.detach(), qmin, qmax, 1.0)
