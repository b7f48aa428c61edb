"""Milliseconds of layers in ONNX Runtime: whose time each operator's is."""

from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import qat
from qat.export.onnxruntime.profiling import _owners, layer_milliseconds


def _node(name: str, reads: str, writes: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, input=reads.split(), output=writes.split())


def test_an_operator_counts_to_the_first_layer_behind_it() -> None:
    nodes = [
        _node("quantize", "x", "a"),
        _node("conv1", "a w1", "b"),
        _node("transpose", "b", "c"),  # for the skip, which only the last layer reads; it runs before conv2
        _node("conv2", "b w2", "d"),
        _node("add", "c d", "e"),
        _node("linear", "e w3", "f"),
        _node("softmax", "f", "g"),
    ]
    found = _owners(nodes, {"w1": "first", "w2": "second", "w3": "third"})
    assert found == {
        "quantize": "first", "conv1": "first", "transpose": "third", "conv2": "second", "add": "third",
        "linear": "third", "softmax": "third",
    }  # fmt: skip


def test_every_layer_of_a_file_has_its_time(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    net = nn.Sequential(block, nn.Flatten(), nn.Linear(4 * 16, 5)).eval()
    images = torch.randn(2, 3, 8, 8)
    model = qat.prepare(net, qat.QuantRecipe(weight=qat.QuantSpec(bits=4)), images)
    qat.calibrate(model, [images])
    qat.export_onnx(model.eval(), tmp_path / "net.onnx", images)
    found = layer_milliseconds(tmp_path / "net.onnx", images, rounds=3)
    assert list(found) == ["0.0", "0.3", "2"] and min(found.values()) > 0


def test_a_file_without_quantized_layers_is_refused(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "float",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "float.onnx")
    with pytest.raises(ValueError, match=r"float\.onnx has no weights on a grid"):
        layer_milliseconds(tmp_path / "float.onnx", torch.zeros(2))
