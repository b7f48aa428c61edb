"""Sums of products beyond what float32 holds."""

import pytest
import torch
from torch import nn

import qat
from qat.integers.products import EXACT, Product
from qat.kernels import kernels_by_formula
from qat.kernels.formulas import products
from qat.kernels.geometry import Geometry
from qat.kernels.integers import CodeGrid, Numbers
from qat.layers import IntegerWeight


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("channels", [1024, 4096])
def test_sums_in_parts_round_once(channels: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Geometry, "is_exact", lambda *unused: False)
    torch.manual_seed(0)
    layer = qat.QuantConv2d(groups * channels, 3, 1, groups=groups)
    weight = torch.randint(90, 128, (3, channels, 1, 1)).float()
    one = torch.ones(3)
    product = Product(
        layer, Geometry([1, 1], [0, 0], [1, 1], groups), IntegerWeight(weight, one, torch.zeros(3), one),
        Numbers(CodeGrid(1.0, 0.0, 0.0, 255.0)),
    )  # fmt: skip
    codes = torch.randint(200, 256, (2, groups * channels, 20, 20), dtype=torch.uint8)
    sums = torch.nn.functional.conv2d(codes.double(), weight.double(), groups=groups)
    assert sums.max() > EXACT and (sums % 2).any()  # so that rounding has something to do
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
    for requantize in ("float32", "fixed_point"):
        made = qat.convert(model.eval(), "reference", requantize)
        expected = made(x)
        assert not calls
        with kernels_by_formula():
            assert torch.equal(made(x), expected)
        assert calls[-2:] == [(256, 16, 24), (32, 16, 32)]  # without the stride, and what is no multiple of 8
        calls.clear()
    images = torch.randint(256, (16, 8, 8), dtype=torch.uint8)  # without a batch
    assert (
        products.integer_sums(images, 3.0, torch.ones(8, 16, 1, 1).char(), Geometry([1, 1], [0, 0], [1, 1], 1)) is None
    )
