"""LSQ: a symmetric integer grid whose step size is learned."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, as_dtype, check_bounds, require_floating, scaled, sum_to_shape
from qat.kernels import choose


class LSQFunction(STEFunction):
    """Round onto an integer grid whose step is learned.

    Forward, with v = x / scale:    y = scale * clamp(round(v), qmin, qmax)
    Backward:    dy/dx     = 1             where qmin <= v <= qmax, else 0
                 dy/dscale = round(v) - v  there, else clamp(v, qmin, qmax); times grad_factor

    The mask is taken on the unrounded v and a value exactly on a bound counts as inside: the paper's strict
    inequality would mask the largest weight of every min-max-initialised channel.

    Shapes: x any; scale () per tensor, or 1 outside the channel axis. Unit of scale: that of x.
    Source: Esser et al., "Learned Step Size Quantization", ICLR 2020, arXiv:1902.08153.
    """

    @staticmethod
    def forward(x: Tensor, scale: Tensor, qmin: int, qmax: int, grad_factor: float) -> Tensor:
        """Quantize in float32 at least: in bfloat16 arithmetic 6-11 % of 8-bit values land on the wrong level."""
        kernels = choose(x, scale)
        if kernels is not None:
            return kernels.quantize(x, scale, None, qmin, qmax)
        wide = torch.promote_types(x.dtype, torch.float32)
        step = scale.to(wide)
        return as_dtype(torch.clamp(torch.round(x.to(wide) / step), qmin, qmax).mul(step), x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, int, float], output: Tensor) -> None:
        x, scale, ctx.qmin, ctx.qmax, ctx.grad_factor = inputs
        ctx.save_for_backward(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, scale = ctx.saved_tensors
        kernels = None if torch.is_grad_enabled() else choose(x, scale)  # kernels have no derivative themselves
        if kernels is not None:
            needs = ctx.needs_input_grad[:2]
            grad_x, grad_scale, _ = kernels.gradients(grad, x, scale, None, ctx.qmin, ctx.qmax, (*needs, False))
            return grad_x, scaled(grad_scale, ctx.grad_factor, scale), None, None, None
        wide = torch.promote_types(x.dtype, torch.float32)
        v = (x.to(wide) / scale.to(wide)).detach()  # residuals and bounds count as constants
        bounded = torch.clamp(v, ctx.qmin, ctx.qmax)
        inside = bounded == v
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.where(inside, grad, 0)
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, torch.round(v) - v, bounded)
            grad_scale = sum_to_shape(grad.to(wide) * slope, scale.shape).mul(ctx.grad_factor).to(scale.dtype)
        return grad_x, grad_scale, None, None, None


def lsq_quantize(x: Tensor, scale: Tensor, qmin: int, qmax: int, grad_factor: float = 1.0) -> Tensor:
    """Put x on the grid scale * {qmin .. qmax}, with LSQ's gradients for x and scale.

    y = scale * clamp(round(x / scale), qmin, qmax); the gradients are those of `LSQFunction`.

    Args:
        x: any shape, floating point.
        scale: step of the grid, > 0, in the unit of x; shape () or broadcastable to x (per channel).
        qmin, qmax: lowest and highest integer.
        grad_factor: factor on the gradient of scale; the paper's is 1/sqrt(N*qmax).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        TypeError: if x is not floating point.
        ValueError: if qmin >= qmax.

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
    require_floating(x, "lsq_quantize")
    return apply(LSQFunction, x, scale, qmin, qmax, grad_factor)
