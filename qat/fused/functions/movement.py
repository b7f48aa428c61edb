"""Operations that move codes without changing a value: reshapings, dropouts that drop nothing, and max pooling.

On codes they move a quarter of the bytes; max pooling takes a byte per element in the backward too, not 64 bits.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.fused.functions.codes import Codes, carrier_for, decode, first_derivative, with_scale_gradient
from qat.integers.movement import Window
from qat.kernels.formulas.pools import pooled_size
from qat.kernels.operators.pools import LARGEST_WINDOW, max_pool_codes, max_pool_codes_backward


class MaxPoolFunction(torch.autograd.Function):
    """Max pooling of codes; the gradient goes to the first largest element of every window."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, codes: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Carrier and codes; the place of the largest element in every window, a byte each, is saved."""
        out, where = max_pool_codes(codes, window.packed())
        ctx.height, ctx.width = codes.shape[2:]
        ctx.window = window
        ctx.save_for_backward(where)
        ctx.mark_non_differentiable(out)
        ctx.set_materialize_grads(False)  # zeros for the codes would be as large as they
        return carrier_for(out, carrier), out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (where,) = ctx.saved_tensors
        return max_pool_codes_backward(grad, where, ctx.height, ctx.width, ctx.window.packed()), None, None


def max_pool(x: Codes | Tensor, window: tuple[Any, ...], module: nn.Module | None = None) -> Codes | Tensor:
    """Max pooling of an (N, C, H, W) tensor or its codes, by the fields of `Window`; module is None for a function."""
    dense = isinstance(x, Codes) and (
        x.codes.is_contiguous() or (x.dim() == 4 and x.codes.is_contiguous(memory_format=torch.channels_last))
    )
    kernel, stride, padding, dilation, ceil_mode = window
    sizes = Window(list(kernel), list(stride), list(padding), list(dilation), ceil_mode)
    fits = dense and x.dim() == 4 and math.prod(kernel) <= LARGEST_WINDOW and not has_empty_windows(x.shape, sizes)
    if not isinstance(x, Codes) or not fits:
        y: Tensor = F.max_pool2d(decode(x), *window) if module is None else module(decode(x))
        return y
    x = with_scale_gradient(x)
    carrier, codes = MaxPoolFunction.apply(x.carrier, x.codes, sizes)
    return Codes(carrier, codes, x.qparams)


def has_empty_windows(shape: torch.Size, window: Window) -> bool:
    """Whether a whole window lies in the padding, as a dilated one may: it has no largest code."""
    for size, kernel, stride, padding, dilation in zip(shape[2:], *window[:4], strict=True):
        if dilation > 1 and padding > 0:
            starts = range(pooled_size(size, kernel, stride, padding, dilation, window.ceil_mode))
            places = [range(k * stride - padding, k * stride - padding + kernel * dilation, dilation) for k in starts]
            if not all(any(0 <= place < size for place in each) for each in places):
                return True
    return False


def reshape(x: Codes | Tensor, method: str, *args: Any, **kwargs: Any) -> Codes | Tensor:
    """x.method(*args, **kwargs) on a tensor or its codes: `flatten`, `transpose` and the like."""
    return _moved(x, lambda tensor: getattr(tensor, method)(*args, **kwargs))


def reshape_by(x: Codes | Tensor, module: nn.Module) -> Codes | Tensor:
    """module(x) on a tensor or its codes: `nn.Flatten` and the like."""
    return _moved(x, module)


def drop(x: Codes | Tensor, dropout: Any) -> Codes | Tensor:
    """dropout(x): x itself while nothing is dropped, else a float tensor, which is no longer on a grid."""
    if not (dropout.training and dropout.p > 0):
        return x
    y: Tensor = dropout(decode(x))
    return y


def shape_of(x: Codes | Tensor) -> Tensor:
    """A float tensor of x's shape and device, whose values mean nothing."""
    return x if isinstance(x, Tensor) else x.carrier


def _moved(x: Codes | Tensor, operation: Callable[[Tensor], Tensor]) -> Codes | Tensor:
    if isinstance(x, Tensor):
        return operation(x)
    x = with_scale_gradient(x)
    return Codes(operation(x.carrier), operation(x.codes), x.qparams)
