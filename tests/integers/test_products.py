"""Sums of products beyond what float32 holds."""

from typing import Any

import pytest
import torch
from torch import nn

import qat
from qat.integers.products import EXACT, Product, geometry_of
from qat.kernels import kernels_by_formula
from qat.kernels.formulas import products
from qat.kernels.geometry import Geometry
from qat.kernels.integers import CodeGrid, Numbers
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
    product = Product(layer, geometry, integers, Numbers(CodeGrid(1.0, 0.0, 0.0, 255.0)))
    size = (2, groups * shape[1], *(each + 20 for each in shape[2:]))
    codes = torch.randint(200, 256, size if len(shape) == 4 else (50, shape[1]), dtype=torch.uint8)
    multiply = torch.nn.functional.linear if len(shape) == 2 else torch.nn.functional.conv2d
    options = {} if len(shape) == 2 else {"groups": groups}
    sums = multiply(codes.double(), weight.double(), **options)
    assert large < 1 or (sums.max() > EXACT and (sums % 2).any())  # so that rounding has something to do
    assert torch.equal(product(codes), sums.float())


def test_by_formula_matrices_multiply_int8_with_the_same_sums(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 1), nn.ReLU(), nn.Conv2d(24, 8, 1, stride=2), nn.Flatten(2),
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip
    x = torch.randn(4, 3, 10, 10)
    model = qat.prepare(net, qat.QuantRecipe(activation=qat.QuantSpec(signed=True)), x)
    qat.calibrate(model, [x])
    calls, original = [], torch._int_mm
    monkeypatch.setattr(products, "_int_mm_found", {})
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: calls.append((*a.shape, b.shape[1])) or original(a, b))
    made = qat.convert(model.eval(), "reference")
    expected = made(x)
    assert not calls
    with kernels_by_formula():
        assert torch.equal(made(x), expected)
    assert calls[-2:] == [(256, 16, 24), (32, 16, 32)]  # without the stride, and what is no multiple of 8
    images = torch.randint(256, (16, 8, 8), dtype=torch.uint8)  # without a batch
    assert (
        products.integer_sums(images, 3.0, torch.ones(8, 16, 1, 1).char(), Geometry([1, 1], [0, 0], [1, 1], 1)) is None
    )
