"""A file for TensorRT keeps its documented rules of explicit quantization; ONNX Runtime still proves it.

The rules: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html and
https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

import qat
from qat.export import compare_layers, lint_onnx
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain

OUTPUT_CHANNELS = {"Conv": 0, "ConvTranspose": 1, "Gemm": -1, "MatMul": -1}
"""The axis of an operator's weight that may have a scale for each of its elements."""


def forward(self: Any, x: Tensor) -> Tensor:
    """A sum, a downsample, a float layer, depthwise and transposed convolutions, linear layers of rows and tokens."""
    x = self.norm(self.stem(x)).relu()
    x = self.left_in_float(x) + self.deep(x)
    x = nn.functional.max_pool2d(self.up(x.relu()).relu(), 2)
    return self.head(self.tokens(x.flatten(2).transpose(1, 2)).relu().mean(1))  # type: ignore[no-any-return]


CONVS = {"stem": nn.Conv2d(3, 8, 3, stride=2), "deep": nn.Conv2d(8, 8, 3, padding=1, groups=8)}
OTHERS = {"norm": nn.BatchNorm2d(8), "left_in_float": nn.Conv2d(8, 8, 1), "up": nn.ConvTranspose2d(8, 8, 2, stride=2)}
NET = Plain(forward, **CONVS, **OTHERS, tokens=nn.Linear(8, 6), head=nn.Linear(6, 5))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Tensor, Path]:
    torch.manual_seed(0)
    x, path = torch.randn(16, 3, 13, 13), tmp_path_factory.mktemp("tensorrt") / "model.onnx"
    model = quantized(NET, x, qat.QuantRecipe(target="tensorrt", overrides={"left_in_float": {"skip": True}}))
    qat.export_onnx(model, path, x)
    return model, x, path


def test_its_rules(exported: tuple[nn.Module, Tensor, Path]) -> None:
    graph = onnx.load(exported[2]).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made_by: dict[str, Any] = {name: node for node in graph.node for name in node.output}
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("QuantizeLinear") >= 7 and kinds.count("DequantizeLinear") >= 12
    assert TensorProto.INT32 not in {tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scale, zero_point = (stored[name] for name in node.input[1:3])
        assert zero_point.dtype == np.int8 and not zero_point.any() and (scale > 0).all()
        if node.op_type == "QuantizeLinear":  # pairs: nothing else reads the integers
            assert {each.op_type for each in graph.node if node.output[0] in each.input} == {"DequantizeLinear"}
        if node.input[0] not in stored:
            assert scale.ndim == 0, f"{node.name}: an activation has one scale"
            assert node.op_type == "QuantizeLinear" or made_by[node.input[0]].op_type == "QuantizeLinear"
    layers = {node.name: node for node in graph.node if node.op_type in OUTPUT_CHANNELS}
    assert {node.op_type for node in layers.values()} >= {"Conv", "ConvTranspose", "Gemm", "MatMul"}
    in_float = [node for node in layers.values() if node.input[1] in stored]
    assert len(in_float) == 1
    for node in layers.values():
        assert all(stored[name].dtype == np.float32 for name in node.input[2:]), f"{node.name}: its bias"
        if node not in in_float:
            check_weight(node, made_by, stored)


def check_weight(node: Any, made_by: dict[str, Any], stored: dict[str, np.ndarray]) -> None:
    """int8 with a scale for each output channel, as this operator reads the weight."""
    weight, turned = made_by[node.input[1]], False
    if weight.op_type == "Transpose":
        weight, turned = made_by[weight.input[0]], True
    turned ^= any(each.name == "transB" and each.i for each in node.attribute)
    codes, scale = stored[weight.input[0]], stored[weight.input[1]]
    (axis,) = [each.i for each in weight.attribute if each.name == "axis"]
    expected = OUTPUT_CHANNELS[node.op_type] % codes.ndim
    assert codes.dtype == np.int8 and axis == (1 - expected if turned else expected), node.name
    assert scale.shape == (codes.shape[axis],)


def test_onnx_runtime_proves_it(exported: tuple[nn.Module, Tensor, Path]) -> None:
    """It makes the same int32 biases of the floats where it computes in integers."""
    model, x, path = exported
    assert not any(each.beyond_ties for each in compare_layers(path, model, x))
    assert qat.verify_onnx(path, model, [x]).agreement == 1
    assert {each.rule.name for each in lint_onnx(path, "tensorrt")} <= {"quantized-sum", "float-operand"}


def test_few_bits_are_neither_packed_nor_clipped_as_integers(tmp_path: Path) -> None:
    """Nothing stands between Q and DQ, the file is one that `lint_onnx` lets pass, and every integer is the model's."""
    torch.manual_seed(0)
    x, path = 3 * torch.randn(16, 3, 13, 13), tmp_path / "model.onnx"
    overrides = {"*": {"weight": {"bits": 4}, "activation": {"bits": 3}}, "left_in_float": {"skip": True}}
    model = quantized(NET, x, qat.QuantRecipe(target="tensorrt", overrides=overrides))
    qat.export_onnx(model, path, x)
    graph = onnx.load(path).graph
    kinds = {tensor.data_type for tensor in graph.initializer}
    assert kinds <= {TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT64}
    assert sum(node.op_type == "Clip" for node in graph.node) >= 4
    assert not [each for each in lint_onnx(path, "tensorrt") if each.severity == "error"]
    assert not any(each.beyond_ties for each in compare_layers(path, model, x))
    assert qat.verify_onnx(path, model, [x]).agreement == 1
