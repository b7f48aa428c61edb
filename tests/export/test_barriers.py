"""Layers that the recipe leaves in float stay float in ONNX Runtime, which would quantize their weights."""

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.export import compare_layers, optimized_operators
from tests.export.test_export_layers import quantized


class Beside(nn.Module):
    """A layer and another one read the same integers, and both results are read as integers."""

    def __init__(self, layer: nn.Module, other: nn.Module, first: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.other = first, layer, other

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.other((self.layer(x) + self.other(x)).relu())


class Functional(Beside):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.other((F.linear(x, self.layer.weight, self.layer.bias) + self.other(x)).relu())


def images(layer: nn.Module) -> tuple[nn.Module, Tensor]:
    return Beside(layer, nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(3, 8, 3)), torch.randn(8, 3, 10, 10)


def rows(kind: type[Beside], layer: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    return kind(layer, nn.Linear(16, 16), nn.Linear(12, 16)), torch.randn(8, *shape, 12)


def cases() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    return {
        "conv": images(nn.Conv2d(8, 8, 3, padding=1)),
        "pool, conv": images(nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 8, 1))),
        "depthwise": images(nn.Conv2d(8, 8, 3, padding=1, groups=8)),
        "transposed": images(nn.ConvTranspose2d(8, 8, 3, padding=1)),
        "linear": rows(Beside, nn.Linear(16, 16, bias=False)),
        "linear of tokens": rows(Beside, nn.Linear(16, 16), 5),
        "functional linear": rows(Functional, nn.Linear(16, 16)),
    }


@pytest.mark.parametrize(
    ("case", "target"),
    [
        *((case, "onnxruntime") for case in cases()),
        ("depthwise", "openvino"),
        ("conv", "tensorrt"),
        ("linear", "tensorrt"),
    ],
)
def test_a_layer_in_float_stays_float(case: str, target: str, tmp_path: Path) -> None:
    """In a default session with all its optimisations, on the same integers; those of its neighbours stay integer."""
    net, x = cases()[case]
    model = qat.prepare(net, qat.QuantRecipe(target=target, overrides={"layer": {"skip": True}}), x)
    check_float(model, x, tmp_path / "model.onnx", layers=2 if x.dim() == 4 and target != "tensorrt" else 0)


def test_a_float_layer_that_was_put_in_after_prepare(tmp_path: Path) -> None:
    net, x = cases()["conv"]
    model = qat.prepare(net, qat.QuantRecipe(), x)
    model.set_submodule("layer", net.get_submodule("layer"))
    check_float(model, x, tmp_path / "model.onnx", layers=2)


def check_float(model: nn.Module, x: Tensor, path: Path, layers: int) -> None:
    qat.calibrate(model, [x])
    with torch.no_grad():  # one channel is far larger: on a grid of the whole tensor little is left of the others
        for name, weight in model.named_parameters():
            if name.startswith("layer") and weight.dim() > 1:
                weight[0] *= 30
    qat.export_onnx(model.eval(), path, x)
    found = compare_layers(path, model, x)
    assert found and not any(each.beyond_ties for each in found), found
    assert qat.verify_onnx(path, model, [x]).agreement == 1
    assert optimized_operators(path)["QLinearConv"] >= layers


def test_a_layer_without_a_grid_in_front_of_it_needs_no_barrier(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    x = torch.randn(4, 3, 10, 10)
    model = quantized(net, x, qat.QuantRecipe(overrides={"0": {"skip": True}}))
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert "LeakyRelu" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
