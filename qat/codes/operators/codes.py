"""Quantized tensors as codes, which layers pass to each other in training.

A quantizer's output as floats takes four times the memory of its codes, and everything that reads it can compute on the
codes. `Codes` holds them; the gradient flows through a carrier, a tensor of the same shape that takes no memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from qat.codes.operators.grid import Learned
from qat.kernels.cpu.quantizers import NO_CLIP

Context: TypeAlias = Any
"""The ctx of a Function, which holds whatever its forward notes for its backward."""


class UnquantizedInput(NamedTuple):
    """The float tensor behind codes, if only the scale needs a gradient."""

    x: Tensor  # an image, say, whose own gradient would be the most expensive one
    learned: Learned


class Codes(NamedTuple):
    """A quantized tensor: (codes - zero) * step."""

    carrier: Tensor  # stands for the tensor in autograd; has its shape and holds no values
    codes: Tensor  # uint8
    qparams: Tensor  # step and zero, which is shifted as the codes are; step is NaN if a value was NaN (`holds_nan`)
    source: UnquantizedInput | None = None  # of an input of the model, whose carrier is not connected to the scale

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.codes.shape

    def dim(self) -> int:
        """Return how many axes the tensor has."""
        return self.codes.dim()


def carrier_for(codes: Tensor, x: Tensor) -> Tensor:
    """Return a tensor of this shape in one element of memory, in the dtype of x."""
    return torch.empty((), dtype=x.dtype, device=codes.device).expand(codes.shape)


def outputs(ctx: Context, codes: Tensor, qparams: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first three of `Codes` as outputs of a Function of the dtype of x."""
    ctx.mark_non_differentiable(codes, qparams)
    ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they
    return carrier_for(codes, x), codes, qparams


def detached_view(y: Tensor) -> Tensor:
    """Return a forward's output so that later operations can change it in place."""
    # Operations in place are refused on a view of a tensor that forward made.
    return y if torch.compiler.is_compiling() else y.detach()


Backward: TypeAlias = Callable[..., tuple[Tensor | None, ...]]


def first_derivative(backward: Backward) -> Backward:
    """Decorate a backward that calls kernels: differentiating it is a RuntimeError."""

    @functools.wraps(backward)
    def wrapped(ctx: Context, grad: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which says so itself
            raise RuntimeError(
                "a prepared model on kernels has first derivatives only; for second ones (create_graph=True) run its"
                " forward in `with qat.kernels.plain_formulas():`"
            )
        return backward(ctx, grad)

    return wrapped


class PreQuantizer(NamedTuple):
    """The tensors before a quantizer, as torch's operations compute them of floats."""

    y: Tensor  # the input of the clip
    z: Tensor  # the input of the quantizer
    bounds: tuple[float, float] = NO_CLIP  # of the clip
