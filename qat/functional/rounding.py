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

    Forward:    y = clamp(scale, 1e-12, 1e12), NaN read as 1e-12
    Backward:   dy/dscale = 1, also outside, so that a scale driven below zero can come back

    Shapes: scale any.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scale: Tensor) -> Tensor:
        """Clamp; NaN, which clamp would keep, becomes the smallest scale."""
        limits = torch.finfo(scale.dtype)
        smallest, largest = max(SMALLEST_SCALE, limits.tiny), min(LARGEST_SCALE, limits.max)
        return torch.nan_to_num(scale, nan=smallest).clamp(smallest, largest)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing to save."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """dy/dscale = 1."""
        return grad


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


def positive_scale(scale: Tensor) -> Tensor:
    """A learned scale as the positive finite number that it acts as; the gradient passes unchanged.

    Args:
        scale: any shape.

    >>> positive_scale(torch.tensor([0.5, -3.0, float("nan")])).tolist()
    [0.5, 9.999999960041972e-13, 9.999999960041972e-13]
    """
    result: Tensor = PositiveScaleFunction.apply(scale)
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
