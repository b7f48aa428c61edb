"""ReLU6 in front of a quantizer of few bits: no Clip of floats is left, and the integers are the model's."""

from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import qat
from qat.export import compare_layers
from qat.export.onnxruntime.passes import fold_clips
from tests.export.test_export_layers import quantized


def exported(act: nn.Module, bits: int, path: Path, share: float = 1.0) -> tuple[nn.Module, Tensor]:
    """Two convolutions with a clip between them, whose grid ends at this share of what calibration found."""

    torch.manual_seed(0)
    x = 6 * torch.randn(8, 3, 12, 12)
    layers = OrderedDict(first=nn.Conv2d(3, 8, 3), act=act, second=nn.Conv2d(8, 4, 3))
    recipe = qat.QuantRecipe({"bits": bits}, {"bits": bits}, residual_bits=bits)
    model = quantized(nn.Sequential(layers), x, recipe)
    with torch.no_grad():
        for each in model.modules():
            if isinstance(each, qat.Quantizer) and each.role == "activation":
                each.scale.mul_(share)
    qat.export_onnx(model, path, x)
    return model, x


def clips(path: Path) -> Counter[str]:
    """How many Clips of floats and of integers the file has."""
    graph = onnx.load(path).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    kinds = [types[node.input[1]] == onnx.TensorProto.FLOAT for node in graph.node if node.op_type == "Clip"]
    return Counter("floats" if kind else "integers" for kind in kinds)


@pytest.mark.parametrize(
    ("bits", "act", "share"),
    [
        (4, nn.ReLU6(), 1.0),
        (4, nn.ReLU6(), 0.5),  # the grid ends first
        (2, nn.ReLU6(), 3.0),  # the clip ends first
        (4, nn.Hardtanh(-1.0, 1.0), 3.0),
        (2, nn.Hardtanh(0.5, 2.0), 0.5),
    ],
    ids=str,
)
def test_the_integers_are_clipped(bits: int, act: nn.Module, share: float, tmp_path: Path) -> None:
    model, x = exported(act, bits, tmp_path / "model.onnx", share)
    assert clips(tmp_path / "model.onnx")["floats"] == 0
    found = compare_layers(tmp_path / "model.onnx", model, x)
    assert found and not any(each.differing for each in found), found
    assert qat.verify_onnx(tmp_path / "model.onnx", model, [x]).max_difference < 1e-5


GRAPH = """<ir_version: 10, opset_import: ["": 21]>
agraph (float[4, 2] x, float least) => (float[4, 2] y OTHER)
<float zero = {0}, float six = {6}, SCALE, uint8 none = {0}, uint8 most = {15}>
{
    clipped = Clip(x, LOW, six)
    wide = QuantizeLinear<axis = 1>(clipped, scale, POINT)
    codes = Clip(wide, none, most)
    y = DequantizeLinear<axis = 1>(codes, scale, POINT)
    MORE
}"""


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({}, False),
        ({"OTHER": ", float[4, 2] clipped"}, True),  # others read the floats
        ({"OTHER": ", uint8[4, 2] wide"}, True),  # others read the integers before they are clipped
        ({"OTHER": ", float[4, 2] z", "MORE": "z = DequantizeLinear(wide, scale, none)"}, True),
        ({"LOW": "least"}, True),  # the bound is computed
        ({"SCALE": "float[2] scale = {0.5, 0.25}, uint8[2] points = {0, 0}", "POINT": "points"}, True),  # two grids
        ({"SCALE": "float[2] scale = {0.5, 0.5}, uint8[2] points = {3, 3}", "POINT": "points"}, False),
    ],
    ids=str,
)
def test_a_clip_stays_where_more_than_one_grid_would_change(changes: dict[str, str], stays: bool) -> None:
    text = GRAPH
    for name, default in {
        "OTHER": "",
        "LOW": "zero",
        "SCALE": "float scale = {0.5}",
        "POINT": "none",
        "MORE": "",
    }.items():
        text = text.replace(name, changes.get(name, default))
    proto = onnx.parser.parse_model(text)
    inputs = {"x": np.linspace(-3, 9, 8, dtype=np.float32).reshape(4, 2), "least": np.float32(0)}

    def answer() -> list[np.ndarray]:
        onnx.checker.check_model(proto)
        return ReferenceEvaluator(proto).run(None, inputs)

    before = answer()
    fold_clips(proto)
    assert [node.op_type for node in proto.graph.node].count("Clip") == 1 + stays
    assert all(map(np.array_equal, before, answer()))


def test_of_eight_bits_a_clip_stays_as_it_is(tmp_path: Path) -> None:
    """A Clip of integers between QuantizeLinear and DequantizeLinear is what other runtimes do not fuse."""
    exported(nn.ReLU6(), 8, tmp_path / "model.onnx")
    assert clips(tmp_path / "model.onnx") == {"floats": 1}
