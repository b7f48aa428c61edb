"""The analysis of 16-bit sums, compared with brute force and with files of known integers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.export import find_saturation
from qat.export.onnx.saturation import worst_pair
from tests.export import test_export_layers as layers


def all_pairs(row: Any, code: int) -> int:
    """Brute force: every pair of weights, every pair of codes at their ends, single products too."""
    codes = np.array([0, code])
    products = np.multiply.outer(row.astype(int), codes).ravel()
    sums = [0, *products]
    for one in range(len(row)):
        for other in range(one):
            sums += [a * row[one] + b * row[other] for a in codes for b in codes]
    return int(max(sums, key=abs))


@pytest.mark.parametrize("code", [255, 135, 15, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_the_worst_pair_is_that_of_brute_force(size: int, code: int) -> None:
    generator = np.random.default_rng(size)
    for low, high in ((-128, 127), (-3, 127), (-128, 3), (1, 90), (-90, -1), (0, 0)):
        row = generator.integers(low, high + 1, size).astype(np.int8)
        assert abs(worst_pair(row, code)) == abs(all_pairs(row.astype(int), code))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.single = nn.Conv2d(8, 8, 1, groups=8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = nn.functional.max_pool2d(torch.relu(self.depthwise(torch.relu(self.single(x)))), 2)
        x = x.mean((2, 3))
        return self.fc(torch.relu(x[:, None] @ x[:, :, None]).flatten(1) * x)


def exported(folder: Path, recipe: qat.QuantRecipe) -> tuple[Path, Any]:
    torch.manual_seed(0)
    path = folder / "model.onnx"
    return path, layers.exported(path, Net(), {"x": torch.rand(4, 3, 8, 8)}, recipe)


def test_layer_by_layer_and_channel_by_channel(tmp_path: Path) -> None:
    path, model = exported(tmp_path, qat.QuantRecipe())
    found = {each.layer: each for each in find_saturation(path)}
    assert list(found) == ["stem", "single", "depthwise", "fc"]  # the product of activations is uint8 by uint8
    for name, each in found.items():
        layer = model.get_submodule(name)
        codes = layer.weight_quantizer.codes(layer.weight).detach().flatten(1).numpy()
        expected = [all_pairs(row, 255) for row in codes]
        assert [abs(value) for value in each.sums] == [abs(value) for value in expected]
        assert each.channels == tuple(i for i, value in enumerate(expected) if not -(2**15) <= value < 2**15)
        assert abs(each.largest) == max(map(abs, expected))
    assert found["single"].channels == () and found["stem"].channels


@pytest.mark.parametrize(
    ("recipe", "may"),
    [
        (qat.QuantRecipe(target="onnxruntime_x86"), False),
        (qat.QuantRecipe(overrides={"*": {"weight": {"max_magnitude": 64}}}), False),
        (qat.QuantRecipe(overrides={"*": {"weight": {"bits": 7}}}), False),
        (qat.QuantRecipe(overrides={"*": {"weight": {"max_magnitude": 65}}}), True),
        # Inputs with seven bits have codes up to 127, and 127 * (127 + 127) fits.
        (qat.QuantRecipe(activation=qat.QuantSpec(bits=7)), False),
        (qat.QuantRecipe(activation=qat.QuantSpec(bits=8)), True),
        # Signed ones arrive with 128 added.
        (qat.QuantRecipe(activation=qat.QuantSpec(bits=4, signed=True, symmetric=True)), True),
        (qat.QuantRecipe(target="tensorrt"), True),
    ],
)
def test_which_models_may_saturate(recipe: qat.QuantRecipe, may: bool, tmp_path: Path) -> None:
    path, _ = exported(tmp_path, recipe)
    found = find_saturation(path)
    assert len(found) >= 4 and any(each.channels for each in found) is may


def test_a_signed_second_factor_may_saturate(tmp_path: Path) -> None:
    """In a product of two activations, whose integers are unknown before it runs."""
    path, _ = exported(tmp_path, qat.QuantRecipe(target="tensorrt"))
    (product,) = [each for each in find_saturation(path) if "quantizer" in each.layer]
    assert product.sums == (-255 * 256,) and product.channels == (0,)
