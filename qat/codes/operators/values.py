"""On a GPU: BatchNorm, clip and quantizer, or a sum with both, as one pass.

It writes values in place of codes. A GPU multiplies in the precision of the step, so the layers behind read what the
prepared graph would give them, and only the passes between the products are fewer. The formulas are `norm`'s and
`add`'s.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qat.codes.operators.codes import Context, first_derivative
from qat.codes.operators.grid import Learned, learned_by
from qat.kernels.cpu.addresses import is_dense
from qat.kernels.cpu.quantizers import NO_CLIP, in_layout_of, rows_of
from qat.kernels.dispatch import triton_here
from qat.quantizer import Quantizer

if TYPE_CHECKING:
    from qat.kernels.triton.chains import Norm, Shape
    from qat.kernels.triton.quantizers import Grid


class NormValuesFunction(torch.autograd.Function):
    """BatchNorm -> clip -> quantizer, as `QuantizeChainFunction`, but returns values."""

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, triton: ModuleType, shape: "Shape",
        norm: "Norm", grid: "Grid",
    ) -> Tensor:  # fmt: skip
        known = triton.settled_norm(y, shape, norm, grid)
        ctx.save_for_backward(y, known)
        ctx.triton, ctx.shape, ctx.follows, ctx.grid = triton, shape, norm.follows, grid
        values: Tensor = triton.norm_quantize(y, shape, known, grid)
        return values

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, known = ctx.saved_tensors
        grad_y, grad_gamma, grad_beta, grad_scale = ctx.triton.norm_quantize_backward(
            in_layout_of(grad, y), y, ctx.shape, known, ctx.grid, ctx.follows
        )
        return grad_y, grad_gamma, grad_beta, grad_scale, None, None, None, None


class SumValuesFunction(torch.autograd.Function):
    """Sum of one or two tensors -> clip -> quantizer, as `AddQuantizeFunction`."""

    @staticmethod
    def forward(
        ctx: Context, a: Tensor, b: Tensor | None, scale: Tensor, triton: ModuleType, grid: "Grid", dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.triton, ctx.grid = triton, grid
        values: Tensor = triton.sum_quantize(a, b, grid, dtype)
        return values

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        writes = any(ctx.needs_input_grad[:2])
        grad_sum, grad_scale = ctx.triton.sum_quantize_backward(in_layout_of(grad, a), a, b, ctx.grid, writes)
        return grad_sum, None if b is None else grad_sum, grad_scale, None, None, None


def norm_values(
    y: Tensor, quantizer: Quantizer, norm: Any, sizes: tuple[int, int, int], floor: float, ceiling: float
) -> Tensor | None:
    """Return quantizer(clip(norm(y))) on a GPU, or None where kernels do not take it."""
    triton = triton_here(y)
    learned = learned_by(quantizer, y) if triton is not None else None
    if triton is None or learned is None:
        return None
    follows = norm.training or norm.running_mean is None
    moves = norm.training and norm.track_running_stats
    if (follows and y.numel() == sizes[1]) or (moves and norm.momentum is None):
        return None  # torch's own says what is wrong, or takes a share that only the device knows
    gamma, beta = (
        torch.full((sizes[1],), start, device=y.device) if given is None else given
        for given, start in ((norm.weight, 1.0), (norm.bias, 0.0))
    )
    share = norm.momentum if moves else None
    kept = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    about = triton.Norm(gamma.detach(), beta.detach(), *kept, norm.eps, share, follows)
    grid = _grid(triton, learned, (floor, ceiling))
    found: Tensor = NormValuesFunction.apply(
        y, gamma, beta, learned.scale, triton, triton.Shape.of(*sizes), about, grid
    )
    return found


def sum_values(a: Tensor, b: Tensor | None, quantizer: Quantizer, floor: float, ceiling: float) -> Tensor | None:
    """Return quantizer(clip(a + b)) on a GPU, or None where kernels do not take it."""
    triton = triton_here(a)
    if triton is None or not a.numel() or not is_dense(a):
        return None
    if b is not None and (a.shape, a.dtype, a.device, a.stride()) != (b.shape, b.dtype, b.device, b.stride()):
        return None
    learned = learned_by(quantizer, a)
    if learned is None or not (b is None or type(b) is Tensor):
        return None
    grid = _grid(triton, learned, (floor, ceiling))
    found: Tensor = SumValuesFunction.apply(a, b, learned.scale, triton, grid, a.dtype)
    return found


def weight_values(weight: Tensor, quantizer: Quantizer) -> Tensor | None:
    """Return quantizer(weight) on a GPU, or None where kernels do not take it."""
    triton = triton_here(weight.detach())
    if triton is None or not weight.numel() or not is_dense(weight) or weight.dtype is not torch.float32:
        return None
    learned = learned_by(quantizer, weight, None)
    if learned is None or not rows_of(weight, learned.scale):
        return None
    grid = _grid(triton, learned, NO_CLIP)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    found: Tensor = SumValuesFunction.apply(weight, None, learned.scale, triton, grid, dtype)
    return found


def _grid(triton: ModuleType, learned: Learned, bounds: tuple[float, float]) -> "Grid":
    tensors = (None if each is None else each.detach() for each in learned[:3])
    found: Grid = triton.Grid(*tensors, learned.levels, bounds)
    return found
