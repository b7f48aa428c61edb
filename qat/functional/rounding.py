"""Roundings with a straight-through gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from qat.functional.forward_mode import apply
from qat.functional.tensors import require_floating


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
    return apply(RoundSTEFunction, require_floating(x, "round_ste"))
