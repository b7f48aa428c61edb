"""Sums of products beyond what float32 holds."""

from typing import Any

import pytest
import torch

import qat
from qat.codes.evaluation.arithmetic import CodeGrid
from qat.codes.evaluation.products import EXACT, Product, geometry_of
from qat.codes.operators.geometry import Geometry
from qat.layers import IntegerWeight

SHAPES = {  # of the weight, and the groups
    "two parts": ((3, 1024, 1, 1), 1),
    "five parts": ((3, 4096, 1, 1), 1),
    "groups": ((4, 1024, 1, 1), 2),
    "more parts than channels": ((3, 2, 60, 60), 1),
    "rows": ((3, 4096), 1),
}


@pytest.mark.parametrize("large", [1.0, 0.3])
@pytest.mark.parametrize("case", SHAPES)
def test_sums_in_parts_round_once(case: str, large: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first of the channels hold nearly all of a sum."""
    monkeypatch.setattr(Geometry, "is_exact", lambda *unused: False)
    torch.manual_seed(0)
    shape, groups = SHAPES[case]
    weight = torch.randint(90, 128, shape).float()
    weight[:, int(large * shape[1]) + 1 :] = 0
    one, outputs = torch.ones(shape[0]), shape[0]
    layer: Any = qat.QuantLinear(shape[1], outputs)
    if len(shape) == 4:
        layer = qat.QuantConv2d(groups * shape[1], outputs, shape[2], groups=groups)
    geometry = geometry_of(layer)
    assert geometry is not None
    integers = IntegerWeight(weight, one, torch.zeros(outputs), one)
    product = Product(layer, geometry, integers, CodeGrid(1.0, 0.0, 0.0, 255.0))
    size = (2, groups * shape[1], *(each + 20 for each in shape[2:]))
    codes = torch.randint(200, 256, size if len(shape) == 4 else (50, shape[1]), dtype=torch.uint8)
    multiply = torch.nn.functional.linear if len(shape) == 2 else torch.nn.functional.conv2d
    options = {} if len(shape) == 2 else {"groups": groups}
    sums = multiply(codes.double(), weight.double(), **options)
    assert large < 1 or (sums.max() > EXACT and (sums % 2).any())  # so that rounding has something to do
    assert torch.equal(product(codes), sums.float())
