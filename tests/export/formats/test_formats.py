"""The formats of a file, and every width in the default one: QONNX has the model's values."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor, nn

import qat
from qat.export import compare_layers, verify_onnx
from tests.export.test_export import Small
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain

GRIDS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of weights and activations
    ({"bits": 8}, {"bits": 8}),
    ({"bits": 4}, {"bits": 4, "signed": True, "symmetric": True}),
    ({"bits": 2, "granularity": "tensor"}, {"bits": 3, "signed": True, "symmetric": False}),
    ({"bits": 1, "rule": "binary"}, {"bits": 8, "signed": True, "symmetric": True}),
]


class Mixed(nn.Module):
    """Convolutions with and without a clip, a residual sum, both poolings, linear layers of 2 and 3 axes, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu6, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6(), nn.MaxPool2d(2)
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8)
        self.down, self.average = nn.Conv2d(8, 16, 1), nn.AdaptiveAvgPool2d(1)
        self.first, self.keys, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        nn.init.normal_(self.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu6(self.stem(x)))
        x = self.relu6(self.down(self.bn(self.conv(x)) + x))
        y = self.first(x.flatten(2).transpose(1, 2))
        y = (y @ self.keys(y).transpose(1, 2)).softmax(-1) @ y
        return self.head(self.average(x).flatten(1) + y.mean(1))


def prepared(weight: dict[str, Any], activation: dict[str, Any]) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 8, 8)
    return quantized(Mixed(), x, qat.QuantRecipe(weight, activation)), x


@pytest.mark.parametrize(("weight", "activation"), GRIDS, ids=str)
def test_qonnx_has_the_same_values(weight, activation, tmp_path, monkeypatch):
    """As the package qonnx computes them; BipolarQuant is the operator of binary weights."""
    pytest.importorskip("qonnx")
    from qonnx.core.modelwrapper import ModelWrapper
    from qonnx.core.onnx_exec import execute_onnx
    from qonnx.transformation.infer_shapes import InferShapes

    model, x = prepared(weight, activation)
    path = tmp_path / "qonnx.onnx"
    qat.export_onnx(model, path, x, format="qonnx")
    proto = onnx.load(path)
    kinds = [node.op_type for node in proto.graph.node]
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(kinds)
    assert kinds.count("BipolarQuant") == (6 if weight["bits"] == 1 else 0)
    monkeypatch.setattr(onnx, "IR_VERSION", proto.ir_version)  # qonnx runs every node as a file of the newest one
    for end in (*proto.graph.input, *proto.graph.output):
        end.type.tensor_type.shape.dim[0].dim_value = len(x)  # which it has to know
    wrapped = ModelWrapper(proto).transform(InferShapes())
    (answer,) = execute_onnx(wrapped, {"x": x.numpy()}).values()
    with torch.no_grad():
        expected = model(x).numpy()
    assert np.allclose(answer, expected, atol=1e-5)


def test_a_grid_of_parts_of_bits_is_no_quant(tmp_path: Path) -> None:
    model, x = prepared({"bits": 8}, {"bits": 8, "max_magnitude": 64, "signed": True, "symmetric": True})
    with pytest.raises(ValueError, match=r"'input_quantizer' has the integers -64 to 64; QONNX has whole bits alone"):
        qat.export_onnx(model, tmp_path / "x.onnx", x, format="qonnx")
    with pytest.raises(ValueError, match=r"^export_onnx: format must be qdq, qonnx, got 'QDQ'$"):
        qat.export_onnx(model, tmp_path / "x.onnx", x, format="QDQ")  # type: ignore[arg-type]


WEIGHTS = [{"bits": bits, "granularity": granularity} for bits in (2, 3, 4, 8) for granularity in ("tensor", "channel")]
SIGNS = [{"signed": signed, "symmetric": symmetric} for signed in (False, True) for symmetric in (False, True)]


class Positive(Small):
    """No operand of its sum is negative."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.stem(x)))
        x = x + self.relu(self.bn(self.conv(x)))
        return self.fc(self.avgpool(x).flatten(1))


def rows() -> list[Any]:
    """Quick is every grid of weights with every width of activations and one of their grids; slow is all the rest."""
    found = []
    for (turn, bits), (number, grid) in itertools.product(enumerate((2, 4, 8)), enumerate(SIGNS)):
        activation = {"bits": bits, **grid}
        few = [each for place, each in enumerate(WEIGHTS) if (place - number - turn) % 4 == 0]
        rest = [each for each in WEIGHTS if each not in few]
        name = f"{'' if grid['signed'] else 'u'}int{bits}-{'symmetric' if grid['symmetric'] else 'affine'}"
        found.append(pytest.param(activation, few, id=name))
        found.append(pytest.param(activation, rest, id=f"{name}-rest", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("activation", "weights"), rows())
def test_every_width_exports_and_verifies(activation, weights, tmp_path):
    torch.manual_seed(0)
    images = torch.randn(16, 3, 8, 8)
    images = images if activation["signed"] or not activation["symmetric"] else images.abs()
    overrides = {f"blocks.{number}.*": {"weight": weight} for number, weight in enumerate(weights)}
    blocks = nn.ModuleList(Positive() for _ in weights)  # one for each grid, so that one export proves some
    for block in blocks:
        nn.init.normal_(block.bn.weight)
    net = Plain(lambda self, x: tuple(block(x) for block in self.blocks), blocks=blocks)
    model = quantized(net, images, qat.QuantRecipe(activation=activation, overrides=overrides))
    path = tmp_path / "x.onnx"
    qat.export_onnx(model, path, images)
    assert verify_onnx(path, model, [images]).agreement == 1
    layers = compare_layers(path, model, images)
    each = 4 if activation["bits"] == 8 else 5  # what a sum reads stays at 8 bits, and has a second quantizer
    assert sum(layer.beyond_ties for layer in layers) == 0 and len(layers) == 1 + each * len(weights)
    packed = [tensor for tensor in onnx.load(path).graph.initializer if tensor.data_type == TensorProto.INT4]
    assert len(packed) == 3 * sum(weight["bits"] <= 4 for weight in weights)
