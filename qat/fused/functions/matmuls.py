"""The product of two quantized tensors on their codes; backward keeps the codes, a quarter of the floats."""

from typing import Any

import torch
from torch import Tensor

from qat.fused.functions.codes import Codes, connected, decode, first_derivative, owned
from qat.kernels.operators.matmuls import arranged, codes_matmul, codes_matmul_backward


class MatmulFunction(torch.autograd.Function):
    """y = ((a - a_zero) * a_step) @ ((b - b_zero) * b_step), both codes.

    Backward:   da = grad @ b^T;    db = a^T @ grad, both operands decoded again
    """

    @staticmethod
    def forward(
        ctx: Any, a_carrier: Tensor, b_carrier: Tensor, a: Tensor, b: Tensor, a_numbers: Tensor, b_numbers: Tensor
    ) -> Tensor:
        """a and b: codes, arranged."""
        ctx.save_for_backward(a, b, a_numbers, b_numbers)
        return owned(codes_matmul(a, b, a_numbers, b_numbers))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the carriers."""
        return *codes_matmul_backward(grad, *ctx.saved_tensors), None, None, None, None


def matmul(a: Codes | Tensor, b: Codes | Tensor) -> Tensor:
    """a @ b, on codes if both operands are codes and have the same axes before the last two.

    Args:
        a: (..., L, E).
        b: (..., E, S).
    """
    if not (
        isinstance(a, Codes) and isinstance(b, Codes) and a.dim() == b.dim() >= 3
        and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2] and a.codes.numel() and b.codes.numel()
        and not (torch.compiler.is_compiling() and a.numbers is b.numbers)  # torch.compile takes no tensor twice
    ):  # fmt: skip
        return torch.matmul(decode(a), decode(b))
    a, b = connected(a), connected(b)
    y: Tensor = MatmulFunction.apply(
        a.carrier, b.carrier, arranged(a.codes), arranged(b.codes), a.numbers, b.numbers
    )  # fmt: skip
    return y
