"""Weights of 2, 3, 4 and 8 bits with every grid of activations: the file has the model's integers, and its answers."""

import itertools
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn

import qat
from qat.export import compare_layers, verify_onnx
from tests.export.test_export_layers import quantized

WEIGHTS = [{"bits": bits, "granularity": granularity} for bits in (2, 3, 4, 8) for granularity in ("tensor", "channel")]
GRIDS = [{"signed": signed, "symmetric": symmetric} for signed in (False, True) for symmetric in (False, True)]


class Block(nn.Module):
    """What a small network of images is made of: a residual sum, both poolings, a BatchNorm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)
        self.conv, self.bn, self.relu = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.average, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)
        nn.init.normal_(self.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.stem(x)))
        x = x + self.relu(self.bn(self.conv(x)))
        return self.head(self.average(x).flatten(1))


class Blocks(nn.Module):
    """A block for each grid of weights, so that one export proves some."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in self.blocks)


def rows() -> list[Any]:
    """Quick is every grid of weights with every width of activations and one of their grids; slow is all the rest."""
    found = []
    for (turn, bits), (number, grid) in itertools.product(enumerate((2, 4, 8)), enumerate(GRIDS)):
        activation = {"bits": bits, **grid}
        few = [each for place, each in enumerate(WEIGHTS) if (place - number - turn) % 4 == 0]
        rest = [each for each in WEIGHTS if each not in few]
        name = f"{'' if grid['signed'] else 'u'}int{bits}-{'symmetric' if grid['symmetric'] else 'affine'}"
        found.append(pytest.param(activation, few, id=name))
        found.append(pytest.param(activation, rest, id=f"{name}-rest", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("activation", "weights"), rows())
def test_every_width_exports_and_verifies(
    activation: dict[str, Any], weights: list[dict[str, Any]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    images = torch.randn(16, 3, 8, 8)
    images = images if activation["signed"] or not activation["symmetric"] else images.abs()
    overrides = {f"blocks.{number}.*": {"weight": weight} for number, weight in enumerate(weights)}
    model = quantized(Blocks(len(weights)), images, qat.QuantRecipe(activation=activation, overrides=overrides))
    path = tmp_path / "x.onnx"
    qat.export_onnx(model, path, images)
    assert verify_onnx(path, model, [images]).agreement == 1
    layers = compare_layers(path, model, images)
    each = 4 if activation["bits"] == 8 else 5  # what a sum reads stays at 8 bits, and has a second quantizer
    assert sum(layer.beyond_ties for layer in layers) == 0 and len(layers) == 1 + each * len(weights)
    packed = [tensor for tensor in onnx.load(path).graph.initializer if tensor.data_type == TensorProto.INT4]
    assert len(packed) == 3 * sum(weight["bits"] <= 4 for weight in weights)
