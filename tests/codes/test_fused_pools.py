"""Max pooling on codes against torch's of the floats."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.codes.operators.codes import Codes, carrier_for
from qat.codes.operators.pool import max_pool
from qat.integers.movement import window_of
from qat.kernels.cpu import compiler
from tests.references.cases_fused import assert_same, images, prepared, two_threads
from tests.references.prepared_case import Plain

__all__ = ["two_threads"]  # a fixture

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


def test_a_window_that_lies_in_the_padding_is_left_to_torch() -> None:
    codes = torch.full((1, 1, 1, 1), 7, dtype=torch.uint8)
    pool = nn.MaxPool2d(2, padding=1, dilation=2)
    window = window_of(pool)
    assert window is not None
    y = max_pool(Codes(carrier_for(codes, torch.empty(())), codes, torch.tensor([0.5, 3.0])), window, pool)
    assert isinstance(y, Tensor) and torch.equal(y, pool((codes.float() - 3) * 0.5))


def test_pools_that_return_indices_are_not_taken() -> None:
    assert window_of(nn.MaxPool2d(2, return_indices=True)) is None


def test_a_pool_as_a_function_runs_on_codes(counted: list[str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.a(x)), 3, 2, padding=1)
        return self.b(x).mean((2, 3)) + x.mean()

    x = images(True)
    assert_same(prepared(Plain(forward, a=nn.Conv2d(3, 16, 3), b=nn.Conv2d(16, 4, 3)), x), x)
    assert "MaxPoolFunction" in counted and "EncodeFunction" not in counted


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("pool_first", [False, True])
def test_a_pool_beside_a_dropout(pool_first: bool, share: float, counted: list[str]) -> None:
    """An active dropout takes the tensor off its grid: what it left is pooled, and read, in float."""
    x = images(True)  # both ways draw the same numbers where tensors lie in the same order
    between = [nn.MaxPool2d(2), nn.Dropout(share)] if pool_first else [nn.Dropout(share), nn.MaxPool2d(2)]
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *between, nn.Conv2d(16, 4, 3))
    model = prepared(net.to(memory_format=torch.channels_last), x)
    assert_same(model, x)
    assert ("MaxPoolFunction" in counted) == (pool_first or share == 0)
