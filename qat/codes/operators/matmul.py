"""Products of two tensors of codes, as in attention."""

import torch
from torch import Tensor

from qat.codes.operators.codes import Codes, Context, detached_view, first_derivative
from qat.codes.operators.operator import operator
from qat.codes.operators.quantize import _dequantize, decode, with_scale_gradient
from qat.kernels.cpu.quantizers import dequantize, in_layout_of


def _codes_matmul(a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor) -> Tensor:
    return torch.matmul(_dequantize(a, a_qparams), _dequantize(b, b_qparams))


def _codes_matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
) -> tuple[Tensor, Tensor]:
    """da = grad @ b^T;  db = a^T @ grad; each in the strides of its operand."""
    grad_a = torch.matmul(grad, _dequantize(b, b_qparams).mT)
    return in_layout_of(grad_a, a), in_layout_of(torch.matmul(_dequantize(a, a_qparams).mT, grad), b)


@operator(_codes_matmul)
def codes_matmul(a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor) -> Tensor:
    """Return a @ b of codes (..., L, E) and (..., E, S), both `dense_matrices`."""
    y = torch.bmm(_matrices(a, a_qparams), _matrices(b, b_qparams))
    return y.view(*a.shape[:-1], b.shape[-1])


@operator(_codes_matmul_backward)
def codes_matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both operands, in their strides."""
    rows = grad.reshape(-1, *grad.shape[-2:])
    grad_a = torch.bmm(rows, _matrices(b, b_qparams).mT)
    x = _matrices(a, a_qparams)
    grad_b = torch.bmm(x.mT, rows) if b.is_contiguous() else torch.bmm(rows.mT, x).mT
    return in_layout_of(grad_a.view(a.shape), a), in_layout_of(grad_b.reshape(b.shape), b)


def dense_matrices(codes: Tensor) -> Tensor:
    """Return codes as dense matrices one after the other, in row or column order."""
    if codes.stride(-2) == 1 < codes.stride(-1):
        return codes.mT.contiguous().mT
    return codes.contiguous()


def _matrices(codes: Tensor, qparams: Tensor) -> Tensor:
    turned = not codes.is_contiguous()
    x = dequantize(codes.mT if turned else codes, qparams).flatten(0, -3)
    return x.mT if turned else x


class MatmulFunction(torch.autograd.Function):
    """y = ((a - a_zero) * a_step) @ ((b - b_zero) * b_step), decoded again backward."""

    @staticmethod
    def forward(
        ctx: Context, a_carrier: Tensor, b_carrier: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
    ) -> Tensor:
        ctx.save_for_backward(a, b, a_qparams, b_qparams)
        return detached_view(codes_matmul(a, b, a_qparams, b_qparams))

    @staticmethod
    @first_derivative
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *codes_matmul_backward(grad, *ctx.saved_tensors), None, None, None, None


def matmul(a: Codes | Tensor, b: Codes | Tensor) -> Tensor:
    """Return a @ b, on codes if both are codes with the same axes before the last two."""
    if not (
        isinstance(a, Codes) and isinstance(b, Codes) and a.dim() == b.dim() >= 3
        and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2] and a.codes.numel() and b.codes.numel()
        and not (torch.compiler.is_compiling() and a.qparams is b.qparams)  # torch.compile takes no tensor twice
    ):  # fmt: skip
        return torch.matmul(decode(a), decode(b))
    a, b = with_scale_gradient(a), with_scale_gradient(b)
    y: Tensor = MatmulFunction.apply(
        a.carrier, b.carrier, dense_matrices(a.codes), dense_matrices(b.codes), a.qparams, b.qparams
    )
    return y
