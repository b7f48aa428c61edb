"""The formats of a file, and every width in the default one: QOperator has its integers, QONNX the model's values."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import qat
from qat.export import compare_layers, find_saturation, verify_onnx
from qat.export.onnxruntime.session import open_session, run_session
from tests.export.test_export import Small
from tests.export.test_export_layers import quantized
from tests.export.test_export_models import MODELS
from tests.references.prepared_case import Plain

# Weights, activations, and how many of three convolutions are QLinearConv: int8 does not end where ReLU6 does, and 4
# bits in int8 meet the 8 bits of sums in uint8.
GRIDS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"bits": 8}, {"bits": 8}, 3),
    ({"bits": 4}, {"bits": 4, "signed": True, "symmetric": True}, 0),
    ({"bits": 2, "granularity": "tensor"}, {"bits": 3, "signed": True, "symmetric": False}, 3),
    ({"bits": 1, "rule": "binary"}, {"bits": 8, "signed": True, "symmetric": True}, 1),
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


def integers_of(path: Path, names: list[str], x: Tensor) -> list[Tensor]:
    proto = onnx.load(path)
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    return run_session(open_session(path, content=proto.SerializeToString()), x)


@pytest.mark.parametrize(("weight", "activation", "integer"), GRIDS, ids=str)
def test_qoperator_has_the_same_integers(weight, activation, integer, tmp_path):
    """In ONNX Runtime those of the default format, and in onnx's own evaluator the model's answers."""
    model, x = prepared(weight, activation)
    plain, path = tmp_path / "plain.onnx", tmp_path / "qoperator.onnx"
    qat.export_onnx(model, plain, x)
    qat.export_onnx(model, path, x, format="qoperator")
    operators = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert (operators["Conv"], operators["QLinearConv"], operators["MatMulInteger"]) == (3 - integer, integer, 5)
    assert not {"Gemm", "MatMul"} & set(operators)
    assert verify_onnx(path, model, [x]).agreement == 1
    layers = compare_layers(path, model, x)
    assert not any(layer.beyond_ties for layer in layers)
    names = [layer.name for layer in layers]
    both = [integers_of(each, names, x) for each in (plain, path)]
    assert sum(int((a != b).sum()) for a, b in zip(*both, strict=True)) == 0
    sums = [{each.layer: each for each in find_saturation(file)} for file in (plain, path)]
    stored = {"stem", "conv", "down", "first", "keys", "head"}
    assert stored <= set(sums[1]) and all(sums[0][name] == sums[1][name] for name in stored)
    (answer,) = ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    assert np.array_equal(answer.argmax(1), both[0][0].numpy().argmax(1))


@pytest.mark.parametrize(("weight", "activation"), [grids[:2] for grids in GRIDS], ids=str)
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


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_qoperator_of_other_models(case: str, tmp_path: Path) -> None:
    """Attention, look-ups, weights that are shared or read by functions, constants."""
    forward, parts, x = MODELS[case]
    path, model = tmp_path / "x.onnx", quantized(Plain(forward, **parts), {"x": x})
    qat.export_onnx(model, path, x, format="qoperator")
    assert verify_onnx(path, model, [x]).agreement == 1
    for optimize in (True, False):
        assert not any(layer.beyond_ties for layer in compare_layers(path, model, x, optimize))


def test_a_grid_of_parts_of_bits_is_no_quant(tmp_path: Path) -> None:
    model, x = prepared({"bits": 8}, {"bits": 8, "max_magnitude": 64, "signed": True, "symmetric": True})
    with pytest.raises(ValueError, match=r"'input_quantizer' has the integers -64 to 64; QONNX has whole bits alone"):
        qat.export_onnx(model, tmp_path / "x.onnx", x, format="qonnx")
    with pytest.raises(ValueError, match=r"^export_onnx: format must be qdq, qoperator, qonnx, got 'QDQ'$"):
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
