"""N2UQ: uniform output levels whose input thresholds are learned."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, as_dtype, require_floating, sum_to_shape, widened

MOST_COMPARED = 63  # thresholds, of 6 bits: up to here comparing with each is faster than a search


class N2UQFunction(STEFunction):
    """Staircase with equal heights and learned widths.

    The knots are S[0] = start and S[k] = start + widths[0] + .. + widths[k - 1], for k up to n = len(widths).

    Forward:    y = step * (qmin + level), level = how many of the thresholds S[k] + widths[k] / 2 lie below x
    Backward:   with f the broken line through the points (S[k], step * (qmin + k)), constant outside of them, and k
                the segment of x, S[k] < x <= S[k + 1] (S[0] belongs to the first one):
                dy/dx         = step / widths[k]                        where S[0] <= x <= S[n], else 0
                dy/dstart     = -dy/dx
                dy/dwidths[j] = -dy/dx for j < k, -dy/dx * (x - S[k]) / widths[k] for j = k, else 0
                dy/dstep      = qmin + level; the rounding level - f/step + qmin counts as a constant
    """

    @staticmethod
    def forward(x: Tensor, start: Tensor, widths: Tensor, step: Tensor, qmin: int) -> Tensor:
        values, first, width, height = widened(x, start, widths, step)
        return as_dtype((qmin + _level(values, _knots(first, width), width)) * height, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        x, start, widths, step = ctx.saved_tensors
        (qmin,) = ctx.options
        values, first, width, height, grad = widened(x, start, widths, step, grad)
        knots = _knots(first, width)
        inside = (values >= knots[0]) & (values <= knots[-1])
        segment = _count_below(knots[1:-1], values)
        slope = 1 / width[segment]
        fraction = (torch.where(inside, values, knots[segment]) - knots[segment]) * slope
        flow = torch.where(inside, grad * height * slope, 0)
        grad_x = grad_start = grad_widths = grad_step = None
        if ctx.needs_input_grad[0]:
            grad_x = flow.to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_start = -flow.sum().reshape(start.shape).to(start.dtype)
        if ctx.needs_input_grad[2]:
            through = _sum_by_segment(flow, segment, width)
            later = through.flip(0).cumsum(0).flip(0) - through  # a width moves all knots behind it
            grad_widths = -(later + _sum_by_segment(flow * fraction, segment, width)).to(widths.dtype)
        if ctx.needs_input_grad[3]:
            level = _level(values, knots, width) + torch.where(inside, fraction - fraction.detach(), 0)
            grad_step = sum_to_shape(grad * (qmin + level), step.shape).to(step.dtype)
        return grad_x, grad_start, grad_widths, grad_step, None


def _knots(start: Tensor, widths: Tensor) -> Tensor:
    return start + torch.nn.functional.pad(widths.cumsum(0), (1, 0))


def _level(x: Tensor, knots: Tensor, widths: Tensor) -> Tensor:
    level = _count_below(knots[:-1] + widths / 2, x).to(x.dtype)
    return torch.where(x.isnan() | knots[-1].isnan(), torch.nan, level)  # the last knot sums start and all widths


def _count_below(points: Tensor, x: Tensor) -> Tensor:
    # Not `torch.searchsorted`: it warns of tensors that are not contiguous, which vmap makes, and counts all for NaN.
    number = points.shape[0]
    if number <= MOST_COMPARED:
        few = torch.zeros_like(x, dtype=torch.uint8)
        for k in range(number):
            few = few + (x > points[k])
        return few.to(torch.int64)
    count = torch.zeros_like(x, dtype=torch.int64)  # a binary search, a bit of the count at a time
    for power in reversed(range(number.bit_length())):
        tried = count + 2**power
        reached = (tried <= number) & (x > points[tried.clamp(max=number) - 1])
        count = torch.where(reached, tried, count)
    return count


def _sum_by_segment(flow: Tensor, segment: Tensor, widths: Tensor) -> Tensor:
    return torch.zeros_like(widths).scatter_add(0, segment.flatten(), flow.flatten())


def n2uq_quantize(x: Tensor, start: Tensor, widths: Tensor, step: Tensor, qmin: int = 0) -> Tensor:
    """Put x on a uniform grid by learned thresholds, with gradients for all four.

    y = step * (qmin + level): level k + 1 begins above start + widths[0] + .. + widths[k - 1] + widths[k] / 2, the
    middle of segment k; the gradients are those of `N2UQFunction`. With equal widths of `step` and start = 0 it is
    a uniform quantizer that rounds ties down.

    Args:
        start: where the first segment begins, in the unit of x; one element, else a ValueError.
        widths: lengths of the n segments, > 0, in the unit of x; shape (n,), else a ValueError. A grid of b bits has
            n = 2^b - 1.
        step: distance of the output levels; shape () or broadcastable to x.
        qmin: integer of the lowest level; 0 for activations after a ReLU.

    Source: Liu et al., "Nonuniform-to-Uniform Quantization", arXiv:2111.14826. Deviation: the input scale is not a
    parameter of its own but part of the widths; on a knot the segment on the left gives the gradient.

    >>> x = torch.tensor([-1.0, 0.6, 1.5, 9.0], requires_grad=True)
    >>> start, widths, step = torch.tensor(0.0), torch.tensor([1.0, 2.0]), torch.tensor(0.5)
    >>> y = n2uq_quantize(x, start, widths, step)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.25, 0.0])
    """
    require_floating(x, "n2uq_quantize")
    if start.numel() != 1:
        raise ValueError(f"n2uq_quantize: start must have one element, got shape {tuple(start.shape)}")
    if widths.ndim != 1 or not widths.shape[0]:
        raise ValueError(f"n2uq_quantize: widths must have shape (n,), one for each step, got {tuple(widths.shape)}")
    return apply(N2UQFunction, x, start.reshape(()), widths, step, qmin)
