"""Quantized convolutions and linear layers on codes: one Function that keeps codes and weight, and nothing else.

The weight is quantized inside, and again in the backward; the input's codes are a quarter of its floats. The forward
runs on integers where the processor multiplies them exactly and it pays, else in float on the same grids.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.kernels import integers_allowed, products
from qat.kernels.chains import dequantize, dot, step_slopes
from qat.kernels.cpu import is_plain, like, quantize_rows, quantize_rows_backward, rows_of
from qat.layers.base import QuantLayer
from qat.layers.codes import Codes, GridInForce, decode, in_training, is_unwatched
from qat.layers.conv import QuantConvolution
from qat.layers.first_derivative import first_derivative
from qat.layers.function import CONVOLUTIONS, QuantFunction
from qat.layers.linear import QuantLinear
from qat.quantizer import Quantizer
from qat.quantizer.lsq import LSQQuantizer


@dataclass(frozen=True)
class Geometry:
    """What a product is besides its operands: a convolution's, or a linear layer's, which has no stride."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def pays_in_integers(self, x: tuple[int, ...], weight: tuple[int, ...], zero: float) -> bool:
        """A rule, not a measurement, so that a resumed run computes as the first did."""
        if self.groups != 1 or (self.stride and len(self.stride) != 2) or math.prod(weight[1:]) < FEWEST_INPUTS:
            return False
        if not self.stride:
            return math.prod(x[:-1]) >= FEWEST_ROWS_QUICKLY_PACKED
        rows = x[0]
        for size, kernel, step, pad, spread in zip(
            x[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True
        ):
            rows *= max((size + 2 * pad - spread * (kernel - 1) - 1) // step + 1, 0)
        quickly_packed = zero == 0 or math.prod(weight[2:]) == 1
        return rows >= (FEWEST_ROWS_QUICKLY_PACKED if quickly_packed else FEWEST_ROWS)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """In float."""
        if not self.stride:
            return F.linear(x, weight, bias)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        )

    def multiply_integers(self, x: Codes, weight: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
        """In integers."""
        if not self.stride:
            return products.linear(x.codes, x.step, x.zero, weight, steps, bias)
        return products.convolution(
            x.codes, x.step, x.zero, weight, steps, bias, list(self.stride), list(self.padding),
            list(self.dilation), self.groups,
        )  # fmt: skip

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, weight and bias."""
        if self.stride:
            found: Any = torch.ops.aten.convolution_backward(
                grad, x, weight, [weight.shape[0]], self.stride, self.padding, self.dilation, False,
                [0] * len(self.stride), self.groups, needs,
            )  # fmt: skip
            return found[0], found[1], found[2]
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            (rows @ weight).view(x.shape) if needs[0] else None,
            rows.T @ inputs if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )


FEWEST_ROWS, FEWEST_ROWS_QUICKLY_PACKED = 512, 160
"""With fewer rows, packing an int8 weight takes longer than multiplying by it saves. oneDNN packs three times as fast
where it need not sum the weight up for a zero point."""

FEWEST_INPUTS = 16


@dataclass(frozen=True)
class WeightGrid:
    """A weight quantizer's numbers for one step of training."""

    low: int
    high: int
    factor: float
    relative: bool


class CodesProductFunction(torch.autograd.Function):
    """y = product((codes - zero) * step, lsq(weight)) + bias.

    Forward:    the weight's codes, then the product of integers, or of both operands in float
    Backward:   of the product in float, its operands quantized anew; then LSQ's for the weight and its scales
    """

    @staticmethod
    def forward(
        carrier: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, codes: Tensor, steps: Tensor,
        smallest: Tensor, numbers: tuple[float, float], geometry: Geometry, grid: WeightGrid, in_integers: bool,
    ) -> Tensor:  # fmt: skip
        """numbers: step and zero of the codes; steps: the weight's scales as they act."""
        x = Codes(codes, carrier, *numbers)
        if in_integers:
            integers = torch.empty_like(weight, dtype=torch.int8)
            quantize_rows(weight, steps, grid.low, grid.high, codes=integers)
            every = steps.reshape(-1).expand(weight.shape[0]).contiguous()
            y = geometry.multiply_integers(x, integers, every, bias)
            return y.fill_(math.nan) if x.step != x.step else y
        values = torch.empty_like(weight)
        quantize_rows(weight, steps, grid.low, grid.high, values=values)
        return geometry.multiply(dequantize(codes, *numbers), values, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Codes and parameters."""
        _, weight, weight_scale, bias, codes, steps, smallest, ctx.numbers, ctx.geometry, ctx.grid, _ = inputs
        ctx.save_for_backward(weight, weight_scale, codes, steps, smallest)
        ctx.has_bias = bias is not None

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of carrier, weight, weight_scale and bias."""
        weight, weight_scale, codes, steps, smallest = ctx.saved_tensors
        grid, needs = ctx.grid, ctx.needs_input_grad
        values = torch.empty_like(weight)
        quantize_rows(weight, steps, grid.low, grid.high, values=values)
        wants_weight = needs[1] or needs[2]
        grad_x, grad_values, grad_bias = ctx.geometry.gradients(
            grad, dequantize(codes, *ctx.numbers), values, (needs[0], wants_weight, ctx.has_bias and needs[3])
        )
        grad_weight = grad_scale = None
        if grad_values is not None:
            grad_weight = like(grad_values, weight)
            grad_scale = quantize_rows_backward(grad_weight, weight, steps, grid.low, grid.high, grad_weight)
            grad_scale = (grad_scale * grid.factor).reshape(weight_scale.shape)
            if grid.relative:
                grad_scale = grad_scale * steps.reshape(weight_scale.shape).square()
            grad_scale = torch.where((weight_scale < smallest) & (grad_scale > 0), 0, grad_scale)
        return grad_x, grad_weight, grad_scale, grad_bias, *[None] * 7


class InputScaleFunction(torch.autograd.Function):
    """The product itself, with the gradient of its input's scale, for an input that needs no gradient.

    Forward:    y
    Backward:   dy = grad;    dscale = sum(grad * product(dx/dscale, weight))

    A product is linear, so the scale's derivative goes forward through it: one more product instead of the gradient of
    the input.
    """

    @staticmethod
    def forward(
        y: Tensor, scale: Tensor, x: Tensor, weight: Tensor, steps: Tensor, force: GridInForce, geometry: Geometry,
        grid: WeightGrid,
    ) -> Tensor:  # fmt: skip
        """A view: nothing is computed."""
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """The input and the parameters."""
        ctx.save_for_backward(*inputs[1:5])
        ctx.force, ctx.geometry, ctx.grid = inputs[5:]

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The product of the slopes with the weight on its grid."""
        scale, x, weight, steps = ctx.saved_tensors
        values = torch.empty_like(weight)
        quantize_rows(weight, steps, ctx.grid.low, ctx.grid.high, values=values)
        derivative = ctx.geometry.multiply(step_slopes(x, ctx.force.grid), values, None)
        total = dot(like(grad, derivative), derivative)
        return grad, ctx.force.parameter_gradient(total, scale), *[None] * 6


def multiply(layer: QuantLayer, x: Codes | Tensor, grid: Quantizer, *operands: Tensor | None) -> Tensor:
    """layer(x, *operands, grid=grid) without a norm, on codes where kernels apply.

    Args:
        layer: a quantized convolution or linear layer.
        x: its input.
        grid: the quantizer that x comes from.
        operands: weight and bias of a `QuantFunction`.
    """
    weight, bias = _parameters(layer, operands)
    geometry = _geometry(layer)
    quantizer = layer.weight_quantizer
    if (
        not isinstance(x, Codes) or geometry is None or not layer.training or layer.input_quantizer is not None
        or not is_unwatched(layer) or not in_training(quantizer) or not _takes(weight, quantizer)
        or not (bias is None or is_plain(bias)) or (geometry.stride and x.dim() != len(geometry.stride) + 2)
        or getattr(layer, "calibrating", False)
    ):  # fmt: skip
        y: Tensor = layer(decode(x), *operands, grid=grid)
        return y
    steps = _steps_in_force(quantizer)
    spec = quantizer.spec
    factor = quantizer.gradient_factor(weight)
    pays = integers_allowed() and geometry.pays_in_integers(x.shape, weight.shape, x.zero)
    in_integers = pays and products.are_exact()
    weight_grid = WeightGrid(spec.qmin, spec.qmax, factor, quantizer.relative_steps)
    y = CodesProductFunction.apply(
        x.carrier, weight, quantizer.scale, bias, x.codes, steps, quantizer.smallest_scale, (x.step, x.zero), geometry,
        weight_grid, in_integers,
    )  # fmt: skip
    if x.source is not None and torch.is_grad_enabled():
        source = x.source
        y = InputScaleFunction.apply(
            y, source.scale, source.x, weight.detach(), steps, source.force, geometry, weight_grid
        )
    return y


def takes_codes(layer: object) -> bool:
    """Whether a layer can compute on codes, by its kind and its grid."""
    if isinstance(layer, QuantFunction):
        fits = layer.function is F.linear or layer.function in CONVOLUTIONS
    else:
        fits = isinstance(layer, (QuantConvolution, QuantLinear))
    if not fits:
        return False
    assert isinstance(layer, QuantLayer)
    quantizer, spec = layer.weight_quantizer, layer.weight_quantizer.spec
    return (
        type(quantizer) is LSQQuantizer and spec.symmetric and spec.signed and spec.bits <= 8 and spec.ewgs == "none"
        and spec.granularity != "group" and _geometry(layer) is not None
    )  # fmt: skip


def _parameters(layer: Any, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    if isinstance(layer, QuantFunction):
        weight, bias = (*operands, None)[:2]
        assert weight is not None
        return weight, bias
    return layer.weight, layer.bias


def _geometry(layer: Any) -> Geometry | None:
    """None for padding that is no number of zeros."""
    if isinstance(layer, QuantFunction):
        if layer.function is F.linear:
            return Geometry()
        axes = CONVOLUTIONS.index(layer.function) + 1
        options = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | layer.options
        given = [options[name] for name in ("stride", "padding", "dilation")]
        if isinstance(given[1], str):
            return None
        sizes = [(value,) * axes if isinstance(value, int) else tuple(value) for value in given]
        return Geometry(sizes[0], sizes[1], sizes[2], options["groups"])
    if isinstance(layer, nn.Linear):
        return Geometry()
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    return Geometry(layer.stride, layer.padding, layer.dilation, layer.groups)


def _takes(weight: Tensor, quantizer: Quantizer) -> bool:
    scale = quantizer.scale
    return (
        is_plain(weight)
        and is_plain(scale)
        and weight.numel() > 0
        and bool(rows_of(weight, scale))
        and (weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)))
    )


@torch.no_grad()
def _steps_in_force(quantizer: Quantizer) -> Tensor:
    """Repair the learned scales if need be, and read them as they act."""
    scale = quantizer.scale
    if not math.isfinite(scale.sum().item()):
        quantizer.repair()
        return quantizer.effective_scale().detach()
    return torch.maximum(scale, quantizer.smallest_scale).clamp_(max=1e12)
