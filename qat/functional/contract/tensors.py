"""What every estimator does with its tensors: keep the type, sum a gradient back to a parameter's shape."""

import torch
from torch import Tensor


def as_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in this dtype; y itself if it is of it already.

    Not `y.to(dtype)` alone: where that changes nothing and ends a Function's forward, torch 2.11's compiler takes the
    output for an alias and the gradients become zero without a word.
    """
    return y if y.dtype == dtype else y.to(dtype)


def sum_to_shape(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient over the axes along which a parameter of this shape was broadcast."""
    return grad.sum_to_size(shape) if len(shape) else grad.sum()


def scaled(grad: Tensor | None, factor: float, parameter: Tensor) -> Tensor | None:
    """A parameter's gradient from a kernel, times a factor, in the parameter's shape and type; None stays None."""
    return None if grad is None else grad.mul(factor).reshape(parameter.shape).to(parameter.dtype)
