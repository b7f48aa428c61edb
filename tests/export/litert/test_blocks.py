"""The integers of blocks, few bits and other targets in every engine that runs .tflite files."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock

import qat

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")
from qat.export import compare_litert_layers
from qat.export.litert.engines import ENGINES
from qat.export.litert.firmware import quantized_multiplier
from qat.export.litert.products import headroom
from tests.export.litert.test_litert import EXACT, NETS, Lambda, prepared


class Functional(nn.Module):
    """A padding word of a function, and an argument that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 4, 3, 5)), nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = F.relu(F.conv2d(x, self.weight, padding="same"))
        return self.last(y if mask is None else y * mask)


OTHERS = {
    "a padding word and an optional argument (point 22)": Functional(),
    "begins with margins (point 22)": nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3)),
    "basic blocks": nn.Sequential(
        BasicBlock(4, 4),
        BasicBlock(4, 8, 2, nn.Sequential(nn.Conv2d(4, 8, 1, 2), nn.BatchNorm2d(8))),
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)],
    ),
    "inverted residuals": nn.Sequential(
        InvertedResidual(4, 4, 1, 6), InvertedResidual(4, 6, 2, 6), nn.Conv2d(6, 8, 1), nn.ReLU6()
    ),
    "an even average": nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)),
    "one output": nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Flatten(), nn.Linear(100, 1)),
    "joined on other grids": nn.Sequential(
        Lambda(lambda a, b: F.relu(torch.cat([a + b, a - b], 1)), 16), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(54, 5)
    ),
    "one operand twice": Lambda(lambda a, b: F.relu(a + a) + b * b),
    "a clip of codes": Lambda(lambda a, b: F.relu6(b) + a * b),
    "a bound between two levels": Lambda(lambda a, b: F.hardtanh(b) + a * b),
}


def check(model: nn.Module, x: Tensor, path: Path) -> None:
    """Every integer in every engine, near-ties aside: within a level where sums are rounded twice, in fixed point."""
    qat.export_litert(model, path, x)
    for engine in ENGINES:
        layers = compare_litert_layers(path, model, x, engine=engine)
        assert layers and max(each.largest for each in layers) <= 1, (engine, layers)
        assert engine not in EXACT or not any(each.beyond_ties for each in layers), (engine, layers)


@pytest.mark.parametrize("name", OTHERS)
def test_every_integer_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = OTHERS[name]
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = prepared(net, torch.randn(4, 4, 9, 9))
    check(model, 1.5 * torch.randn(6, 4, 9, 9), tmp_path / "model.tflite")


class Clipped(nn.Module):
    """A clip in place, which is no part of the layer before it: both have a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardtanh_(self.norm(self.conv(x)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bound_between_two_levels_is_one_of_the_next_grid(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for size in (10, 20, 40, 80):  # on some of these grids the bound would be rounded down, and show
        x = size * torch.randn(4, 4, 9, 9)
        model = prepared(Clipped().eval(), x)
        qat.export_litert(model, tmp_path / "model.tflite", x)
        layers = compare_litert_layers(tmp_path / "model.tflite", model, x, engine=engine)
        assert max(each.largest for each in layers) <= 1, layers


@pytest.mark.parametrize(("weight", "activation"), [(8, 6), (4, 4), (2, 3)])
def test_few_bits(weight: int, activation: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = {"weight": qat.QuantSpec(bits=weight), "activation": qat.QuantSpec(bits=activation)}
    x = torch.randn(4, 4, 9, 9)
    check(prepared(OTHERS["basic blocks"], x, **recipe), torch.randn(4, 4, 9, 9), tmp_path / "model.tflite")


@pytest.mark.parametrize("name", ["joined on other grids", "flatten of an image", "basic blocks"])
def test_grids_of_another_target(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = OTHERS[name] if name in OTHERS else NETS[name][0]
    model = prepared(net, torch.randn(4, 4, 9, 9), target="onnxruntime")
    check(model, torch.randn(4, 4, 9, 9), tmp_path / "model.tflite")


def test_multipliers_are_close_and_normal() -> None:
    for real in [*np.exp(np.random.default_rng(0).uniform(-20, 5, 1000)), 1.0, 0.5, 1 - 2**-40]:
        multiplier, shift = quantized_multiplier(float(real))
        assert 2**30 <= multiplier < 2**31
        assert multiplier * 2.0 ** (shift - 31) == pytest.approx(real, rel=2**-31)
    assert quantized_multiplier(2.0**-40) == (0, 0)


def test_headroom_fills_int8_and_keeps_the_bias() -> None:
    bias = torch.tensor([2**28 - 1, -3])
    assert headroom(torch.tensor([[1, -1]]), torch.tensor([5])) == 64
    assert headroom(torch.tensor([[7, -8]]), torch.tensor([5])) == 8
    assert headroom(torch.tensor([[1, -1]]), bias) == 4
    assert headroom(torch.tensor([[0]]), torch.tensor([0])) == 64


class Shuffled(nn.Module):
    """A clip that is computed before the shuffle in front of it, while another reader wants the shuffled tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        y: Tensor = self.conv(x.relu()) + x
        return y


def test_a_quantizer_behind_a_shuffle_has_its_integers_under_its_name(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 3, 6)
    model = qat.prepare(Shuffled(), qat.QuantRecipe(target="litert"), x)
    qat.calibrate(model, [x])
    qat.export_litert(model.eval(), tmp_path / "model.tflite", x, batch=2)
    layers = compare_litert_layers(tmp_path / "model.tflite", model, x)
    assert [layer.beyond_ties for layer in layers] == [0] * 4
