"""Primitives with a straight-through gradient: rounding, and keeping a learned scale usable."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

SMALLEST_SCALE = 1e-12
"""A learned scale never acts as less than this: still a normal float32 after multiplication with another one."""

LARGEST_SCALE = 1e12


class RoundSTEFunction(torch.autograd.Function):
    """Round to the nearest integer, ties to even, as if it were the identity.

    Forward:    y = round(x)
    Backward:   dy/dx = 1

    Shapes: x any. Source: Bengio et al., arXiv:1308.3432.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Round half to even, as ONNX QuantizeLinear does."""
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing to save: the gradient does not depend on x."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """dy/dx = 1."""
        return grad


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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, stopped where it would push a scale that is too small even lower."""
        scale, smallest = ctx.saved_tensors
        return torch.where((scale < smallest) & (grad > 0), 0, grad), None


def round_ste(x: Tensor) -> Tensor:
    """Round to the nearest integer, ties to even; the gradient passes unchanged.

    Args:
        x: any shape, floating point.

    Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", arXiv:1308.3432.

    >>> x = torch.tensor([0.5, 1.5, -0.4], requires_grad=True)
    >>> y = round_ste(x)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.0, 2.0, -0.0], [1.0, 1.0, 1.0])
    """
    result: Tensor = RoundSTEFunction.apply(require_floating(x, "round_ste"))
    return result


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
    result: Tensor = PositiveScaleFunction.apply(scale, smallest.to(scale.dtype))
    return result


def require_floating(x: Tensor, caller: str) -> Tensor:
    """Return x if it is floating point, so that integers fail with a sentence instead of deep in a kernel.

    Raises:
        TypeError: for integer, bool or complex tensors.
    """
    if not x.is_floating_point():
        raise TypeError(f"{caller}: x must be a floating-point tensor, got {x.dtype}")
    return x


def as_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in this dtype; y itself if it is of it already.

    Not `y.to(dtype)` alone: where that changes nothing and ends a Function's forward, torch 2.11's compiler takes the
    output for an alias and the gradients become zero without a word.
    """
    return y if y.dtype == dtype else y.to(dtype)


def sum_to_shape(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient over the axes along which a parameter of this shape was broadcast."""
    return grad.sum_to_size(shape) if len(shape) else grad.sum()
