"""Straight-through estimators with one mistake each, as they are made: LSQ on the grid -8 .. 7, unless said otherwise.

`qat.testing.ste_gradcheck` has to catch every one of them; see test_testing.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat.functional.tensors import as_dtype

QMIN, QMAX = -8, 7


class Parts(NamedTuple):
    """What a backward pass is made of."""

    x: Tensor
    scale: Tensor
    v: Tensor
    inside: Tensor
    slope: Tensor


def parts(ctx: Any) -> Parts:
    x, scale = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    v = x.to(wide) / scale.to(wide)
    inside = (v >= QMIN) & (v <= QMAX)
    slope = torch.where(inside, (torch.round(v) - v).detach(), torch.clamp(v, QMIN, QMAX).detach())
    return Parts(x, scale, v, inside, slope)


def summed(grad: Tensor, parameter: Tensor) -> Tensor:
    return grad.sum_to_size(parameter.shape).to(parameter.dtype)


class Right(torch.autograd.Function):
    """The rule without a mistake; each broken one replaces what it gets wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = torch.clamp(torch.round(x.to(wide) / scale.to(wide)), QMIN, QMAX) * scale.to(wide)
        return as_dtype(y, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        found = parts(ctx)
        grad_x = torch.where(found.inside, grad, 0) if ctx.needs_input_grad[0] else None
        grad_scale = summed(grad * found.slope, found.scale) if ctx.needs_input_grad[1] else None
        return grad_x, grad_scale


def broken(name: str, **methods: Callable[..., Any]) -> type[torch.autograd.Function]:
    return type(name, (Right,), {key: staticmethod(method) for key, method in methods.items()})


def of_x(name: str, gradient: Callable[[Tensor, Parts], Tensor]) -> type[torch.autograd.Function]:
    """With this gradient of x."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return gradient(grad, parts(ctx)) if ctx.needs_input_grad[0] else None, Right.backward(ctx, grad)[1]

    return broken(name, backward=backward)


def of_scale(name: str, gradient: Callable[[Tensor, Parts], Tensor | None]) -> type[torch.autograd.Function]:
    """With this gradient of the scale."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return Right.backward(ctx, grad)[0], gradient(grad, parts(ctx)) if ctx.needs_input_grad[1] else None

    return broken(name, backward=backward)


MissingMask = of_x("MissingMask", lambda grad, p: grad)
StrictBounds = of_x("StrictBounds", lambda grad, p: torch.where((p.v > QMIN) & (p.v < QMAX), grad, 0))
# The residual everywhere, outside the range too.
WrongScaleGradient = of_scale(
    "WrongScaleGradient", lambda grad, p: summed(grad * (torch.round(p.v) - p.v).detach(), p.scale)
)
ForgetsTheScale = of_scale("ForgetsTheScale", lambda grad, p: None)
# Right for one scale, the same sum in every channel for many.
NoSumOverChannels = of_scale(
    "NoSumOverChannels", lambda grad, p: (grad * p.slope).sum().to(p.scale.dtype).expand(p.scale.shape)
)
ResidualNotDetached = of_scale(
    "ResidualNotDetached", lambda grad, p: summed(grad * torch.where(p.inside, p.v.round() - p.v, p.slope), p.scale)
)
DifferentiableOnce = broken("DifferentiableOnce", backward=once_differentiable(Right.backward))
# `view` takes no incoming gradient with other strides.
ViewsTheGradient = broken(
    "ViewsTheGradient", backward=lambda ctx, grad: Right.backward(ctx, grad.view(grad.numel()).view(grad.shape))
)
# Divides in the dtype of x: in bfloat16 many values land on the next level.
NarrowArithmetic = broken(
    "NarrowArithmetic",
    forward=lambda x, scale: torch.clamp(torch.round(x / scale.to(x.dtype)), QMIN, QMAX) * scale.to(x.dtype),
)
ReturnsFloat32 = broken(
    "ReturnsFloat32", forward=lambda x, scale: Right.forward(x.to(torch.promote_types(x.dtype, torch.float32)), scale)
)
ForgetsTheDevice = broken(
    "ForgetsTheDevice", forward=lambda x, scale: Right.forward(x, scale) + torch.zeros(x.shape[-1:], dtype=x.dtype)
)
NoNaN = broken("NoNaN", forward=lambda x, scale: Right.forward(torch.nan_to_num(x, nan=0.0), scale))
DensifiesItsOutput = broken(
    "DensifiesItsOutput", forward=lambda x, scale: Right.forward(x, scale).clone(memory_format=torch.contiguous_format)
)
WritesIntoX = broken("WritesIntoX", forward=lambda x, scale: x.copy_(Right.forward(x, scale)).clone())


# Computes both gradients whatever is needed.
AsksNobody = broken(
    "AsksNobody",
    backward=lambda ctx, grad: (torch.where((p := parts(ctx)).inside, grad, 0), summed(grad * p.slope, p.scale)),
)
# Python's `if` on a tensor, in the backward pass.
BranchesOnTheData = broken(
    "BranchesOnTheData",
    backward=lambda ctx, grad: (MissingMask if parts(ctx).inside.all() else Right).backward(ctx, grad),
)
# A guard over the whole tensor: one NaN, and every gradient is NaN.
DisturbsItsNeighbours = of_x(
    "DisturbsItsNeighbours", lambda grad, p: torch.where(p.inside, grad, 0) + 0 * p.x.sum().detach()
)


def averaged(grad: Tensor, found: Parts) -> Tensor:
    """A mean where the rule says a sum, made good by the number of elements: 0 / 0 for none."""
    count = torch.tensor(float(grad.numel()), device=grad.device)
    return summed(grad * found.slope, found.scale) / count * count


AveragesTheGradient = of_scale("AveragesTheGradient", averaged)


class ReadsTheScale(Right):
    """.item(): a host synchronisation, which neither vmap nor meta tensors can do, and no compiler a branch on it."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        if scale.amin().item() <= 0:
            raise ValueError("scale must be positive")
        return Right.forward(x, scale)


class WrongTangent(Right):
    """A jvp of its own, without the mask."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, scale: Tensor | None) -> Tensor:
        slope = parts(ctx).slope
        return (0 if x is None else x) + (0 if scale is None else slope * scale)  # type: ignore[return-value]


class OldStyle(torch.autograd.Function):
    """forward(ctx, ...): torch.func takes no such Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return Right.forward(x, scale)

    backward = Right.backward


class Alias(torch.autograd.Function):
    """The identity, as itself: some compilers lose the gradient of an output that is an input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class SavesItsSlope(Alias):
    """Bi-Real's sign, whose slope 2 - 2|x| is computed in the forward pass: a constant for the second derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.where(x >= 0, 1, torch.where(x < 0, -1, x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        (x,) = inputs
        ctx.slope = torch.where(x.abs() <= 1, 2 - 2 * x.abs(), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.slope
