"""Straight-through estimators with one mistake each, as they are made: LSQ on the grid -8 .. 7, unless said otherwise.

`qat.testing.ste_gradcheck` has to catch every one of them; see test_testing.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat.functional.tensors import as_dtype

QMIN, QMAX = -8, 7


class Right(torch.autograd.Function):
    """The rule without a mistake; each broken one overrides what it gets wrong."""

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
        _, scale, _, inside, slope = parts(ctx)
        grad_x = torch.where(inside, grad, 0) if ctx.needs_input_grad[0] else None
        grad_scale = summed(grad * slope, scale) if ctx.needs_input_grad[1] else None
        return grad_x, grad_scale


def parts(ctx: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    v = x.to(wide) / scale.to(wide)
    inside = (v >= QMIN) & (v <= QMAX)
    slope = torch.where(inside, (torch.round(v) - v).detach(), torch.clamp(v, QMIN, QMAX).detach())
    return x, scale, v, inside, slope


def summed(grad: Tensor, parameter: Tensor) -> Tensor:
    return grad.sum_to_size(parameter.shape).to(parameter.dtype)


class MissingMask(Right):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return grad if ctx.needs_input_grad[0] else None, Right.backward(ctx, grad)[1]


class StrictBounds(Right):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        v = parts(ctx)[2]
        grad_x = torch.where((v > QMIN) & (v < QMAX), grad, 0) if ctx.needs_input_grad[0] else None
        return grad_x, Right.backward(ctx, grad)[1]


class WrongScaleGradient(Right):
    """The residual everywhere, outside the range too."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _, scale, v, _, _ = parts(ctx)
        grad_scale = summed(grad * (torch.round(v) - v).detach(), scale) if ctx.needs_input_grad[1] else None
        return Right.backward(ctx, grad)[0], grad_scale


class ForgetsTheScale(Right):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return Right.backward(ctx, grad)[0], None


class AsksNobody(Right):
    """Computes both gradients whatever is needed."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _, scale, _, inside, slope = parts(ctx)
        return torch.where(inside, grad, 0), summed(grad * slope, scale)


class NoSumOverChannels(Right):
    """Right for one scale, the same sum in every channel for many."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _, scale, _, _, slope = parts(ctx)
        grad_scale = (grad * slope).sum().to(scale.dtype).expand(scale.shape) if ctx.needs_input_grad[1] else None
        return Right.backward(ctx, grad)[0], grad_scale


class ResidualNotDetached(Right):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        _, scale, v, inside, slope = parts(ctx)
        slope = torch.where(inside, torch.round(v) - v, slope)
        return Right.backward(ctx, grad)[0], summed(grad * slope, scale) if ctx.needs_input_grad[1] else None


class DifferentiableOnce(Right):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return Right.backward(ctx, grad)


class BranchesOnTheData(Right):
    """Python's `if` on a tensor, in the backward pass."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inside = parts(ctx)[3]
        if inside.all():
            return grad if ctx.needs_input_grad[0] else None, Right.backward(ctx, grad)[1]
        return Right.backward(ctx, grad)


class ReturnsFloat32(Right):
    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.clamp(torch.round(x.to(wide) / scale.to(wide)), QMIN, QMAX) * scale.to(wide)


class NarrowArithmetic(Right):
    """Divides in the dtype of x: in bfloat16 many values land on the next level."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return torch.clamp(torch.round(x / scale.to(x.dtype)), QMIN, QMAX) * scale.to(x.dtype)


class ReadsTheScale(Right):
    """.item(): a host synchronisation, which neither vmap nor meta tensors can do, and no compiler a branch on it."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        if scale.amin().item() <= 0:
            raise ValueError("scale must be positive")
        return Right.forward(x, scale)


class ForgetsTheDevice(Right):
    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return Right.forward(x, scale) + torch.zeros(x.shape[-1:], dtype=x.dtype)


class NoNaN(Right):
    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return Right.forward(torch.nan_to_num(x, nan=0.0), scale)


class DisturbsItsNeighbours(Right):
    """A guard over the whole tensor: one NaN, and every gradient is NaN."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x = ctx.saved_tensors[0]
        grad_x, grad_scale = Right.backward(ctx, grad)
        return None if grad_x is None else grad_x + 0 * x.sum().detach(), grad_scale


class DensifiesItsOutput(Right):
    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return Right.forward(x, scale).clone(memory_format=torch.contiguous_format)


class ViewsTheGradient(Right):
    """`view` takes no incoming gradient with other strides."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return Right.backward(ctx, grad.view(grad.numel()).view(grad.shape))


class AveragesTheGradient(Right):
    """A mean where the rule says a sum, made good by the number of elements: 0 / 0 for none."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        grad_x, grad_scale = Right.backward(ctx, grad)
        count = torch.tensor(float(grad.numel()), device=grad.device)
        return grad_x, None if grad_scale is None else grad_scale / count * count


class WritesIntoX(Right):
    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x.copy_(Right.forward(x, scale)).clone()


class WrongTangent(Right):
    """A jvp of its own, without the mask."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, scale: Tensor | None) -> Tensor:
        slope = parts(ctx)[4]
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


class SavesItsSlope(torch.autograd.Function):
    """Bi-Real's sign, whose slope 2 - 2|x| is computed in the forward pass: a constant for the second derivative."""

    generate_vmap_rule = True

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


class SwappedBounds(torch.autograd.Function):
    """clamp(x, low, high) with the gradients of low and high in each other's place."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return as_dtype(torch.minimum(torch.maximum(x, low), high), x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, high = ctx.saved_tensors
        grads = [torch.where((x >= low) & (x <= high), grad, 0)]
        grad = grad.to(torch.promote_types(x.dtype, torch.float32))
        grads += [summed(torch.where(x > high, grad, 0), low), summed(torch.where(x < low, grad, 0), high)]
        return tuple(each if asked else None for each, asked in zip(grads, ctx.needs_input_grad, strict=True))
