"""What the tests of this room start from: the same random numbers, the same images."""

import pytest
import torch
from torch import Tensor

from tests.references.cases_fused import counted, images

__all__ = ["counted"]  # a fixture


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return images()
