"""What the tests of this room start from: the same random numbers, the same images, the same calibrated model."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.references.cases_fused import counted, images, prepared
from tests.references.nets import Block

__all__ = ["counted"]  # a fixture


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return images()


@functools.cache
def calibrated(net: type[nn.Module]) -> nn.Module:
    return prepared(net(), images())


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """A prepared block, or the file's `NET`."""
    return copy.deepcopy(calibrated(getattr(request.module, "NET", Block)))
