"""Keeping a learned scale usable: positive and finite, whatever the optimizer made of it."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.contract.forward_mode import apply

SMALLEST_SCALE = 1e-12
"""A learned scale never acts as less than this: still a normal float32 after multiplication with another one."""

LARGEST_SCALE = 1e12


class PositiveScaleFunction(torch.autograd.Function):
    """Read a learned scale as a positive, finite number, whatever the optimizer made of it.

    Forward:    y = min(max(scale, smallest), 1e12); NaN is read as smallest
    Backward:   dy/dscale = 1, but 0 where scale < smallest and a step against the gradient would lower it further

    So a scale that was driven below comes back as soon as the loss asks for more, and does not run away meanwhile.

    Shapes: scale any; smallest broadcastable to it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scale: Tensor, smallest: Tensor) -> Tensor:
        """The comparison is false for NaN, so NaN becomes smallest."""
        largest = min(LARGEST_SCALE, torch.finfo(scale.dtype).max)
        return torch.where(scale >= smallest, scale, smallest).clamp(max=largest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Keep both inputs: which side scale lies on decides the gradient."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        """The gradient, stopped where it would push a scale that is too small even lower."""
        if not ctx.needs_input_grad[0]:
            return None, None
        scale, smallest = ctx.saved_tensors
        return torch.where((scale < smallest) & (grad > 0), 0, grad), None


def positive_scale(scale: Tensor, smallest: Tensor | None = None) -> Tensor:
    """A learned scale as the positive finite number that it acts as; see `PositiveScaleFunction`.

    Args:
        scale: any shape.
        smallest: what it acts as at least, > 0, broadcastable to scale; default 1e-12.

    >>> positive_scale(torch.tensor([0.5, -3.0, float("nan")]), torch.tensor(0.25)).tolist()
    [0.5, 0.25, 0.25]
    """
    if smallest is None:
        smallest = scale.new_tensor(max(SMALLEST_SCALE, torch.finfo(scale.dtype).tiny))
    return apply(PositiveScaleFunction, scale, smallest.to(scale.dtype))


class ScaleGradientFunction(torch.autograd.Function):
    """The identity, with a smaller or larger gradient.

    Forward:    y = x
    Backward:   dy/dx = factor
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: Tensor) -> Tensor:
        """A copy: a Function that returns its own input confuses torch 2.11's compiler."""
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """The factor is all that backward needs."""
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """dy/dx = factor."""
        (factor,) = ctx.saved_tensors
        return (grad * factor).to(grad.dtype), None


def scale_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """x itself, its gradient multiplied by factor: how LSQ slows down the learning of a scale.

    Args:
        x: any shape, floating point; meant for parameters of few elements, it is copied.
        factor: of the gradient; a number, or a tensor that broadcasts to x and gets no gradient itself.

    Source: Esser et al., arXiv:1902.08153, section 2.2.

    >>> scale = torch.tensor(0.5, requires_grad=True)
    >>> scale_gradient(scale, 0.1).backward()
    >>> scale.grad
    tensor(0.1000)
    """
    factor = factor.detach() if isinstance(factor, Tensor) else x.new_full((), factor)
    return apply(ScaleGradientFunction, x, factor)
