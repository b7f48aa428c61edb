"""EWGS: a straight-through gradient scaled by the error of the rounding."""

from typing import Any

import torch
from torch import Tensor

from qat.functional.rounding import round_ste
from qat.functional.tensors import STEFunction, apply, require_floating, setting_beside, tensor_beside, widened


class EWGSGradientFunction(STEFunction):
    """Identity with the gradient of `ewgs_gradient`; scale and delta get none."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, delta: Tensor) -> Tensor:
        return x.clone()  # torch 2.11's compiler loses the gradient of a forward that returns its input

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        x, scale, delta = ctx.saved_tensors
        value, step, strength, grad = widened(x, scale, delta, grad)
        v = value / step
        nearest = torch.round(v)
        residual = torch.where(v == nearest, 0, v - nearest).detach()  # inf - inf would be NaN
        # All but g counts as constant, its sign too: in forward mode, which stands at g = 0, the tangent passes.
        stretched = grad * (1 + strength.detach() * torch.sign(grad).detach() * residual)
        return stretched.to(x.dtype), None, None


def ewgs_round(x: Tensor, delta: Tensor | float) -> Tensor:
    """Round to the nearest integer, ties to even, with element-wise gradient scaling.

    y = round(x); dL/dx = g * (1 + delta * sign(g) * (x - round(x))) with g = dL/dy. Forward mode knows no g whose sign
    could be used: there the tangent passes unchanged.

    Args:
        x: in units of the grid's step.
        delta: strength, >= 0, the paper's 1e-3 .. 0.2; 0 is `round_ste`. A number, or a tensor of shape () or
            broadcastable to x. No gradient.

    Source: Lee et al., "Network Quantization with Element-wise Gradient Scaling", arXiv:2104.00903.

    >>> x = torch.tensor([0.25, 0.25, 2.0], requires_grad=True)
    >>> y = ewgs_round(x, 0.5)
    >>> y.backward(torch.tensor([1.0, -1.0, 1.0]))
    >>> y.tolist(), x.grad.tolist()
    ([0.0, 0.0, 2.0], [1.125, -0.875, 1.0])
    """
    require_floating(x, "ewgs_round")
    strength = checked_delta(x, delta, "ewgs_round")
    return round_ste(apply(EWGSGradientFunction, x, tensor_beside(x, 1.0), strength))


def ewgs_gradient(x: Tensor, scale: Tensor | float, delta: Tensor | float) -> Tensor:
    """Return x; put before a uniform quantizer of this scale, it makes that one EWGS.

    y = x; dL/dx = g * (1 + delta * sign(g) * (v - round(v))) with v = x / scale and g = dL/dy. As the zero point is an
    integer, v - round(v) is the rounding error of affine grids too; where the quantizer clips, g is 0 and stays 0.

    Args:
        scale: step of the grid, > 0, in the unit of x; a number, or a tensor of shape () or broadcastable to
            x. No gradient from here.
        delta: strength, as in `ewgs_round`. No gradient.

    Source: Lee et al., arXiv:2104.00903.

    >>> from qat.functional.lsq import lsq_quantize
    >>> x, scale = torch.tensor([0.625, 9.0], requires_grad=True), torch.tensor(0.5)
    >>> y = lsq_quantize(ewgs_gradient(x, scale, 0.5), scale, -8, 7)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.5, 3.5], [1.125, 0.0])
    """
    require_floating(x, "ewgs_gradient")
    step = setting_beside(x, scale, "scale", "ewgs_gradient")
    return apply(EWGSGradientFunction, x, step, checked_delta(x, delta, "ewgs_gradient"))


def checked_delta(x: Tensor, delta: Tensor | float, caller: str) -> Tensor:
    """Return the strength as a tensor."""
    # A tensor's values are not checked: reading them would wait for the device.
    if not isinstance(delta, Tensor) and not delta >= 0:
        raise ValueError(f"{caller}: delta must be at least 0, got {delta}")
    return setting_beside(x, delta, "delta", caller)
