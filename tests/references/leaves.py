"""Leaves of a graph and their gradients, as the tests of single estimators write them."""

import torch
from torch import Tensor

from tests.references import estimator_proof as proof


def leaf(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).clone().requires_grad_()


def cotangent(y: Tensor) -> Tensor:
    """An uneven gradient of the output, of both signs: sums over wrong axes and lost signs show."""
    return torch.as_tensor(proof.cotangent(y.shape)).to(y.dtype)


def gradients(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, leaves, cotangent(y)))


def slopes(y: Tensor, *leaves: Tensor) -> list[list[float]]:
    return [gradient.tolist() for gradient in torch.autograd.grad(y.sum(), leaves)]


def same(got: Tensor, expected: object) -> None:
    """Equal to the last bit, NaN where NaN is expected."""
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=0, atol=0, equal_nan=True)
