"""Quantized tensors as codes: what layers pass to each other in training where kernels compute on integers.

A quantizer's output is a float tensor four times the size of its codes, and everything that reads it can compute on the
codes. `Codes` holds them; the gradient flows through a carrier, a tensor of the same shape that takes no memory.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qat.kernels.chains import dequantize, quantize_codes
from qat.kernels.cpu import Grid, grid_gradients, is_dense, is_plain, like
from qat.layers.first_derivative import first_derivative
from qat.quantizer import Quantizer
from qat.quantizer.lsq import LSQQuantizer

SHIFT = 128
"""Added to the codes and zero points of signed grids, so that all codes are uint8."""


@dataclass(frozen=True)
class GridInForce:
    """A quantizer's numbers for one step of training.

    Attributes:
        grid: as the kernels take it, shifted to uint8.
        factor: of the gradient that the parameter gets, per unit of the step's.
        on_floor: whether the scale acts as more than it is, so that a gradient that lowers it further is dropped.
    """

    grid: Grid
    factor: float
    on_floor: bool

    def parameter_gradient(self, total: float, scale: Tensor) -> Tensor:
        """The gradient of the learned scale from that of the step."""
        gradient = total * self.factor
        return torch.full_like(scale, 0.0 if self.on_floor and gradient > 0 else gradient)


@dataclass(frozen=True)
class Source:
    """A tensor that needs no gradient itself, quantized with a scale that learns.

    Its readers find the scale's gradient without that of the tensor, which for an image is the dearest of all: that of
    a convolution at full resolution.
    """

    x: Tensor
    scale: Tensor
    force: GridInForce


@dataclass(frozen=True)
class Codes:
    """A quantized tensor: (codes - zero) * step.

    Attributes:
        codes: uint8.
        carrier: float32 of the same shape, which stands for the tensor in autograd and holds no values.
        step, zero: of the grid, zero shifted as the codes are; step is NaN if there was a NaN among the values.
        source: of an input of the model, what it was made of; the carrier is then not connected to the scale.
    """

    codes: Tensor
    carrier: Tensor
    step: float
    zero: float
    source: "Source | None" = None

    @property
    def shape(self) -> torch.Size:
        """As of the tensor that it stands for."""
        return self.codes.shape

    def dim(self) -> int:
        """As of the tensor that it stands for."""
        return self.codes.dim()


def has_codes(quantizer: Any) -> bool:
    """Whether a quantizer's output can be held as codes: the rule `lsq`, one scale, at most 8 bits."""
    return (
        type(quantizer) is LSQQuantizer
        and quantizer.spec.granularity == "tensor"
        and quantizer.spec.ewgs == "none"
        and quantizer.spec.bits <= 8
    )


def in_training(quantizer: Quantizer) -> bool:
    """Whether it quantizes as in training: calibrated, not observing, nobody hooked to its calls."""
    return quantizer.training and quantizer.observer is None and quantizer.is_calibrated and is_unwatched(quantizer)


def is_unwatched(module: Any) -> bool:
    """Whether no hook waits for this module to be called; kernels compute without calling it."""
    return not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def grid_in_force(quantizer: Quantizer, x: Tensor) -> GridInForce:
    """Repair the learned scale if need be, and read it; x is what will be quantized."""
    scale, smallest = quantizer.scale.item(), quantizer.smallest_scale.item()
    if not math.isfinite(scale):
        quantizer.repair()
        scale = quantizer.scale.item()
    step = quantizer.effective_scale().item() if scale < smallest or scale > 1e6 else scale
    shift = SHIFT if quantizer.spec.signed else 0
    low, high = quantizer.bounds()
    zero = 0.0 if quantizer.zero_point is None else quantizer.zero_point.item()
    factor = quantizer.gradient_factor(x) * (step * step if quantizer.relative_steps else 1.0)
    return GridInForce(Grid(step, zero + shift, low + shift, high + shift), factor, scale < smallest)


def carrier_for(codes: Tensor) -> Tensor:
    """A float32 tensor of this shape in one element of memory."""
    return torch.empty((), dtype=torch.float32).expand(codes.shape)


class QuantizeFunction(torch.autograd.Function):
    """A quantizer alone, as codes; formulas as of `LSQPlusFunction`."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, force: GridInForce) -> tuple[Tensor, Tensor, bool]:
        """Carrier, codes, and whether there was a NaN."""
        codes, bad = quantize_codes(x, force.grid)
        return carrier_for(codes), codes, bad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, bool]) -> None:
        """The input; the codes are the reader's to keep."""
        ctx.save_for_backward(*inputs[:2])
        ctx.force = inputs[2]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """One pass."""
        x, scale = ctx.saved_tensors
        grad_x, total, _ = grid_gradients(like(grad, x), x, ctx.force.grid, ctx.needs_input_grad[0])
        return grad_x, ctx.force.parameter_gradient(total, scale), None


class DecodeFunction(torch.autograd.Function):
    """Codes as the float tensor that they stand for.

    Forward:    y = (codes - zero) * step
    Backward:   dy/dcarrier = 1: the gradient of the step belongs to the quantizer that made the codes
    """

    @staticmethod
    def forward(carrier: Tensor, codes: Tensor, step: float, zero: float) -> Tensor:
        """One pass."""
        return dequantize(codes, step, zero)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing to save."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """dy/dcarrier = 1."""
        return grad, None, None, None


class EncodeFunction(torch.autograd.Function):
    """A float tensor that lies on a grid already (behind max pooling, say) as codes.

    Forward:    codes = round(x / step) + zero
    Backward:   dcarrier/dx = 1
    """

    @staticmethod
    def forward(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, bool]:
        """Carrier, codes, and whether there was a NaN."""
        codes, bad = quantize_codes(x, grid)
        return carrier_for(codes), codes, bad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, bool]) -> None:
        """Nothing to save."""
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor, None]:
        """dcarrier/dx = 1."""
        return grad, None


def quantize(x: Tensor, quantizer: Quantizer) -> Codes:
    """The quantizer's codes of a dense float32 tensor."""
    force = grid_in_force(quantizer, x)
    if x.requires_grad or not quantizer.scale.requires_grad:
        return in_codes(QuantizeFunction.apply(x, quantizer.scale, force), force)
    codes, bad = quantize_codes(x, force.grid)
    return in_codes((carrier_for(codes), codes, bad), force, Source(x, quantizer.scale, force))


def in_codes(made: tuple[Tensor, Tensor, bool], force: GridInForce, source: Source | None = None) -> Codes:
    """What a Function made (carrier, codes, whether there was a NaN) on this grid."""
    carrier, codes, bad = made
    return Codes(codes, carrier, math.nan if bad else force.grid.step, force.grid.zero, source)


def connected(x: Codes) -> Codes:
    """The same with a carrier through which the scale gets its gradient, for readers who cannot find it themselves."""
    if x.source is None:
        return x
    return in_codes(QuantizeFunction.apply(x.source.x, x.source.scale, x.source.force), x.source.force)


def decode(x: Codes | Tensor) -> Tensor:
    """The float tensor; a tensor is one already."""
    if isinstance(x, Tensor):
        return x
    x = connected(x)
    y: Tensor = DecodeFunction.apply(x.carrier, x.codes, x.step, x.zero)
    return y


def encode(x: Codes | Tensor, quantizer: Quantizer, *dropouts: Any) -> Codes | Tensor:
    """Codes of a tensor that lies on this quantizer's grid; the tensor itself where kernels do not apply.

    Args:
        x: the tensor.
        quantizer: whose grid it is.
        dropouts: the layers that it went through; an active one takes it off the grid.
    """
    if not isinstance(x, Tensor) or not (is_plain(x) and x.numel() and is_dense(x) and in_training(quantizer)):
        return x
    if any(dropout.training and dropout.p > 0 for dropout in dropouts):
        return x
    force = grid_in_force(quantizer, x)
    return in_codes(EncodeFunction.apply(x, force.grid), force)
