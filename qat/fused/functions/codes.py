"""Quantized tensors as codes, which layers pass to each other in training where kernels compute on integers.

A quantizer's output as floats takes four times the memory of its codes, and everything that reads it can compute on the
codes. `Codes` holds them; the gradient flows through a carrier, a tensor of the same shape that takes no memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from qat.kernels.cpu.addresses import is_dense
from qat.kernels.cpu.quantizers import NO_CLIP, Levels, dequantize, is_plain
from qat.kernels.formulas import quantizers as formulas
from qat.kernels.operators.quantizers import quantize_codes, quantize_codes_backward
from qat.quantizer import Quantizer
from qat.quantizer.registry import estimator_of

SHIFT = 128
"""Added to the codes and zero points of signed grids, so that all codes are uint8."""


def codes_refusal(quantizer: Quantizer) -> str | None:
    """Why a quantizer's output cannot be held as codes; None if it can: the rule `lsq`, one scale, at most 8 bits."""
    spec = quantizer.spec
    if spec.granularity != "tensor":
        return f"it has a scale per {spec.granularity}, and codes have one"
    return rule_refusal(quantizer)


def rule_refusal(quantizer: Quantizer) -> str | None:
    """Why kernels do not compute a quantizer's rule; None if they do."""
    spec = quantizer.spec
    if estimator_of(quantizer) != "lsq":
        return f"kernels compute the rule 'lsq', and {type(quantizer).__name__} computes something else"
    if spec.ewgs != "none":
        return f"ewgs={spec.ewgs!r} corrects its gradient, which kernels do not"
    return f"it has {spec.bits} bits, and a code has 8" if spec.bits > 8 else None


def mode_refusal(quantizer: Quantizer) -> str | None:
    """Why a quantizer does not quantize as in training; None if it does."""
    if not quantizer.training:
        return "it is in evaluation"
    if quantizer.observer is not None:
        return "it observes a range"
    if quantizer.is_disabled:
        return "it is switched off"
    return None if quantizer.is_calibrated else "it is not calibrated"


class Learned(NamedTuple):
    """A quantizer's grid as kernels take it; zero_point is None on a symmetric grid."""

    scale: Tensor
    smallest: Tensor
    zero_point: Tensor | None
    levels: Levels


class UnquantizedInput(NamedTuple):
    """The float tensor behind codes, if only the scale needs a gradient: an image's own would be the most expensive."""

    x: Tensor
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
        """How many axes the tensor has."""
        return self.codes.dim()


NOT_TAKEN = "its scale or zero point is not a contiguous float32 tensor on a device that kernels run on"
"""Why `learned_by` finds nothing."""


def learned_by(quantizer: Quantizer, x: Tensor, scales: int | None = 1) -> Learned | None:
    """What kernels need to put x on a quantizer's grid; None if they do not take its tensors.

    Each attribute is read once, since a model of 50 layers asks 100 times a step. scales: how many the kernel takes;
    None: as many as there are.
    """
    scale, smallest, zero_point = quantizer.scale, quantizer.smallest_scale, quantizer.zero_point
    count = scale.numel() if scales is None else scales
    for tensor in (scale, smallest) if zero_point is None else (scale, smallest, zero_point):
        if not is_plain(tensor) or tensor.numel() != count or not tensor.is_contiguous():
            return None
    return Learned(scale, smallest, zero_point, levels_of(quantizer, x))


_LATEST: WeakKeyDictionary[Quantizer, tuple[object, Levels]] = WeakKeyDictionary()
"""The latest levels of each quantizer, and what they follow from."""


def levels_of(quantizer: Quantizer, x: Tensor) -> Levels:
    """Bounds, shift, and the factor on the scale's gradient; worked out again only for another shape of x."""
    basis = (quantizer.spec, quantizer.role, x.shape)
    latest = None if torch.compiler.is_compiling() else _LATEST.get(quantizer)
    if latest is not None and latest[0] == basis:
        return latest[1]
    (low, high), shift = quantizer.bounds(), SHIFT if quantizer.spec.signed else 0
    factor, relative = quantizer.gradient_factor(x), quantizer.relative_steps
    levels = Levels(float(low), float(high), float(shift), float(factor), float(relative))
    if not torch.compiler.is_compiling():
        _LATEST[quantizer] = basis, levels
    return levels


def carrier_for(codes: Tensor, x: Tensor) -> Tensor:
    """A tensor of this shape in one element of memory, in the dtype of x: that of the gradients which it will carry."""
    return torch.empty((), dtype=x.dtype, device=codes.device).expand(codes.shape)


def outputs(ctx: Any, codes: Tensor, qparams: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first three of `Codes` as the outputs of a Function, which quantizes something of the dtype of x."""
    ctx.mark_non_differentiable(codes, qparams)
    ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they
    return carrier_for(codes, x), codes, qparams


def detached_view(y: Tensor) -> Tensor:
    """The output of a Function's forward, not as a view of a tensor that forward made: views cannot be changed in
    place by later operations."""
    return y if torch.compiler.is_compiling() else y.detach()


Backward = Callable[..., tuple[Tensor | None, ...]]


def first_derivative(backward: Backward) -> Backward:
    """Decorator for a Function's backward that calls kernels: an error where its result could be differentiated."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which says so itself
            raise RuntimeError(
                "a prepared model on kernels has first derivatives only; for second ones (create_graph=True) run its"
                " forward in `with qat.kernels.plain_formulas():`"
            )
        return backward(ctx, grad)

    return wrapped


class PreQuantizer(NamedTuple):
    """What torch's operations compute before a quantizer, of floats: the plain form of a function that quantizes."""

    y: Tensor  # the input of the clip
    z: Tensor  # the input of the quantizer
    bounds: tuple[float, float] = NO_CLIP  # of the clip


class QuantizeFunction(torch.autograd.Function):
    """A quantizer alone, as codes; the formulas are those of `LSQPlusFunction`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The input is saved; the codes are kept by their readers.
        codes, qparams = quantize_codes(x, [scale, smallest, zero_point], levels)
        ctx.save_for_backward(x, scale, smallest, zero_point)
        ctx.levels = levels
        return outputs(ctx, codes, qparams, x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x = ctx.needs_input_grad[0]
        x, *grid = ctx.saved_tensors
        grad_x, grad_scale = quantize_codes_backward(grad, x, grid, ctx.levels, needs_x)
        return grad_x if needs_x else None, grad_scale, None, None, None


class DecodeFunction(torch.autograd.Function):
    """y = (codes - zero) * step, with dy/dcarrier = 1; the step's gradient belongs to the quantizer of the codes."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, codes: Tensor, qparams: Tensor) -> Tensor:
        """One pass; torch.compile fuses it with the operations behind it."""
        if torch.compiler.is_compiling():
            return formulas.dequantize(codes, qparams)
        return dequantize(codes, qparams)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class EncodeFunction(torch.autograd.Function):
    """codes = round(x / step) + zero of x on a grid already (behind max pooling, say), with dcarrier/dx = 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, smallest: Tensor, zero_point: Tensor | None, levels: Levels
    ) -> tuple[Tensor, Tensor, Tensor]:
        return outputs(ctx, *quantize_codes(x, [scale, smallest, zero_point], levels), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


def quantize(x: Tensor, learned: Learned) -> Codes:
    """The codes of a dense tensor that kernels take; see `holds_nan`."""
    if x.requires_grad or not learned.scale.requires_grad:
        return Codes(*QuantizeFunction.apply(x, *learned))
    codes, qparams = quantize_codes(x, [learned.scale.detach(), *learned[1:3]], learned.levels)
    return Codes(carrier_for(codes, x), codes, qparams, UnquantizedInput(x, learned))


def holds_nan(x: Codes) -> bool:
    """Whether a value was NaN: no code stands for it, so the tensor has to stay in floats.

    Compiled code does not ask; the whole tensor is NaN there.
    """
    return not torch.compiler.is_compiling() and math.isnan(x.qparams[0].item())


def with_scale_gradient(x: Codes) -> Codes:
    """The same codes, with a carrier through which the scale gets its gradient: for readers that ignore the source."""
    return x if x.source is None else Codes(*QuantizeFunction.apply(x.source.x, *x.source.learned))


def decode(x: Codes | Tensor) -> Tensor:
    """The float tensor; a tensor is returned as it is."""
    if isinstance(x, Tensor):
        return x
    y: Tensor = DecodeFunction.apply(*with_scale_gradient(x)[:3])
    return y


def encode(x: Codes | Tensor, quantizer: Quantizer, *dropouts: Any) -> Codes | Tensor:
    """Codes of a tensor on this grid; the tensor itself where kernels do not apply, or a dropout is active."""
    if not isinstance(x, Tensor) or not (is_plain(x) and x.numel() and is_dense(x)):
        return x
    if any(dropout.training and dropout.p > 0 for dropout in dropouts):
        return x
    learned = learned_by(quantizer, x)
    if learned is None:
        return x
    codes = Codes(*EncodeFunction.apply(x, *learned))
    return x if holds_nan(codes) else codes
