"""Operators that multiply two quantized tensors, batch by batch: the products of attention."""

import torch
from torch import Tensor

from qat.kernels.cpu.quantizers import dequantize, like
from qat.kernels.formulas import matmuls as formulas
from qat.kernels.operators.operator import operator


@operator(
    lambda a, b, a_qparams, b_qparams: torch.empty(*a.shape[:-1], b.shape[-1], dtype=torch.float32),
    formulas.codes_matmul,
)
def codes_matmul(a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor) -> Tensor:
    """a @ b of two tensors of codes, in float32.

    Args:
        a: uint8, (..., L, E), arranged by `arranged`.
        b: uint8, (..., E, S), arranged, with a's sizes before the last two axes.
        a_qparams, b_qparams: step and zero of each.
    """
    y = torch.bmm(_matrices(a, a_qparams), _matrices(b, b_qparams))
    return y.view(*a.shape[:-1], b.shape[-1])


@operator(
    lambda grad, a, b, *rest: (torch.empty_like(a, dtype=grad.dtype), torch.empty_like(b, dtype=grad.dtype)),
    formulas.codes_matmul_backward,
)
def codes_matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of both operands, in their strides."""
    rows = grad.reshape(-1, *grad.shape[-2:])
    grad_a = torch.bmm(rows, _matrices(b, b_qparams).mT)
    x = _matrices(a, a_qparams)
    grad_b = torch.bmm(x.mT, rows) if b.is_contiguous() else torch.bmm(rows.mT, x).mT
    return like(grad_a.view(a.shape), a), like(grad_b.reshape(b.shape), b)


def arranged(codes: Tensor) -> Tensor:
    """The same codes as dense matrices one after the other; each stays in row or column order."""
    if codes.stride(-2) == 1 < codes.stride(-1):
        return codes.mT.contiguous().mT
    return codes.contiguous()


def _matrices(codes: Tensor, qparams: Tensor) -> Tensor:
    """The values of codes as matrices: three axes, in float32."""
    turned = not codes.is_contiguous()
    x = dequantize(codes.mT if turned else codes, qparams).flatten(0, -3)
    return x.mT if turned else x
