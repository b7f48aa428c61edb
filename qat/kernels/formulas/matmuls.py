"""Formulas for the product of two quantized tensors, batch by batch; see `qat.kernels.operators.matmuls`."""

import torch
from torch import Tensor

from qat.kernels.formulas.autocasting import result_dtype, without_autocast
from qat.kernels.formulas.grids import integers_again, like
from qat.kernels.formulas.quantizers import dequantize


def codes_matmul(a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor) -> Tensor:
    """((a - a_zero) @ (b - b_zero)) * (a_step * b_step), in float32 or in autocast's dtype.

    The integers are multiplied, which bfloat16 and TF32 hold exactly. In float16 the values are multiplied instead:
    sums of integers overflow beyond 65504, and the values' sums are no larger than in any model in float16.
    """
    dtype = result_dtype(a, torch.float32)
    with without_autocast(a):
        if dtype is torch.float16:
            y = torch.bmm(_rows(dequantize(a, a_qparams), dtype), _rows(dequantize(b, b_qparams), dtype))
        else:
            x, z = (codes - qparams[1].to(dtype) for codes, qparams in ((a, a_qparams), (b, b_qparams)))
            y = (torch.bmm(_rows(x, dtype), _rows(z, dtype)) * (a_qparams[:1] * b_qparams[:1])).to(dtype)
    return y.view(*a.shape[:-1], b.shape[-1])


def codes_matmul_backward(
    grad: Tensor, a: Tensor, b: Tensor, a_qparams: Tensor, b_qparams: Tensor
) -> tuple[Tensor, Tensor]:
    """da = grad @ b^T;  db = a^T @ grad, with values in grad's dtype; each in the strides of its operand."""
    rows = grad.reshape(-1, *grad.shape[-2:])
    x, z = (
        _rows(integers_again(codes, qparams[1]) * qparams[0], grad.dtype)
        for codes, qparams in ((a, a_qparams), (b, b_qparams))
    )
    with without_autocast(grad):
        grad_a, grad_b = torch.bmm(rows, z.mT), torch.bmm(x.mT, rows)
    return like(grad_a.view(a.shape), a, grad.dtype), like(grad_b.view(b.shape), b, grad.dtype)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, as a batch of matrices: three axes."""
    return x.to(dtype).flatten(0, -3)
