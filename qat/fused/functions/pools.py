"""Max pooling of codes: a byte per element for forward and for backward, instead of floats and 64-bit indices."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.fused.functions.codes import Codes, carrier_for, decode, first_derivative, with_scale_gradient
from qat.fused.movement import Window
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
