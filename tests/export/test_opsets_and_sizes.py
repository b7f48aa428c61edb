"""Opsets below those that torch.onnx writes, and files whose images may have any height and width."""

import functools
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.export import compare_layers, optimized_operators, verify_onnx
from qat.export.onnxruntime.verification import check_other_sizes
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw

IMAGES = draw(2, 3, 16, 24)


def forward(self: Any, x: Tensor) -> Tensor:
    """A residual sum, gates, pieces of two sizes, and an image of the input's size."""
    y = F.hardswish(self.stem(x))
    y = F.max_pool2d(y + self.conv(y), 2)
    y = y * F.hardsigmoid(y.mean((2, 3), keepdim=True))
    y = self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    a, b = y.split(3, 1)
    y = self.head(torch.cat([a, b * a.amax(1, keepdim=True)], 1))
    return F.interpolate(y, size=x.shape[-2:], mode="bilinear")


@functools.cache
def net() -> nn.Module:
    torch.manual_seed(0)
    layers = {"stem": nn.Conv2d(3, 5, 3, 2, 1), "conv": nn.Conv2d(5, 5, 3, 1, 1), "head": nn.Conv2d(5, 4, 1)}
    return quantized(Plain(forward, norm=nn.LayerNorm(5), **layers), IMAGES)


@pytest.mark.parametrize(("opset", "format"), [
    *((opset, "qdq") for opset in (13, 14, 15, 16, 17, 18, 25)), (13, "qonnx"),
])  # fmt: skip
def test_older_opsets_compute_the_same_integers(opset: int, format: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    qat.export_onnx(net(), path, IMAGES, opset=opset, format=format)
    proto = onnx.load(path)
    assert next(each.version for each in proto.opset_import if not each.domain) == opset
    if format == "qonnx":  # no runtime here reads it
        return
    assert opset > 17 or proto.ir_version == (7 if opset < 15 else 8)  # no more than the runtimes of the time read
    onnx.checker.check_model(proto, full_check=True)
    assert verify_onnx(path, net(), [IMAGES]).max_difference < 1e-5
    assert optimized_operators(path)["QLinearConv"] == 3
    assert not any(layer.beyond_ties for layer in compare_layers(path, net(), IMAGES))


def test_operators_without_older_ones_are_refused(tmp_path: Path) -> None:
    model = quantized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Mish()), IMAGES)
    with pytest.raises(ValueError, match=r"export_onnx: Mish \(.*\) needs opset 18, got opset=17"):
        qat.export_onnx(model, tmp_path / "x.onnx", IMAGES, opset=17)
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.parametrize(("opset", "dynamic"), [(13, ["batch", "height", "width"]), (21, ["width"])])
def test_images_of_free_sizes(opset: int, dynamic: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    qat.export_onnx(net(), path, IMAGES, opset=opset, dynamic=dynamic)
    graph, every = onnx.load(path).graph, "height" in dynamic
    axes = ["batch", 3, "height", "width"] if every else [2, 3, 16, "width"]
    for end, channels in ((graph.input[0], 3), (graph.output[0], 4)):
        found = [axis.dim_value or axis.dim_param for axis in end.type.tensor_type.shape.dim]
        assert found == [axes[0], channels, *axes[2:]]
    for width in (40, 35):
        other = draw(3, 3, 21, width) if every else draw(2, 3, 16, width)
        assert verify_onnx(path, net(), [other]).is_right
        assert not any(layer.beyond_ties for layer in compare_layers(path, net(), other))


@pytest.mark.parametrize(("layers", "inputs", "said"), [
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 22, 3)), IMAGES, "does not run with"),
    (lambda: Plain(lambda self, x: self.conv(x).relu() if x.shape[2] == 16 else self.conv(x), conv=nn.Conv2d(3, 4, 3)),
     IMAGES, "does not run with float32 \\(2, 3, 48, 88\\): the model was prepared for inputs with"),
    (lambda: nn.Sequential(nn.Linear(4, 3)), draw(2, 4), "no image \\(N, C, H, W\\) has a free height"),
])  # fmt: skip
def test_models_of_one_size_are_refused(layers: Any, inputs: Tensor, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"export_onnx: dynamic: .*{said}"):
        qat.export_onnx(quantized(layers(), inputs), tmp_path / "x.onnx", inputs, dynamic=("batch", "height", "width"))
    assert not (tmp_path / "x.onnx").exists()


def test_a_file_that_answers_otherwise_is_refused(tmp_path: Path) -> None:
    """The file is another model's, which scales by its height."""
    path = tmp_path / "x.onnx"
    for scaled in (True, False):  # the same names of quantizers and the same integers at 16
        torch.manual_seed(0)
        model = quantized(
            Plain(
                lambda self, x, scaled=scaled: self.conv(x) * (x.shape[2] if scaled else 16), conv=nn.Conv2d(3, 4, 3)
            ),
            IMAGES,
        )
        if scaled:
            qat.export_onnx(model, path, IMAGES, dynamic=("height",))
    with pytest.raises(ValueError, match=r"dynamic: with float32 .* the file answers otherwise than the model"):
        check_other_sizes(model, path.read_bytes(), lambda height, _: draw(2, 3, 16 + height, 24))
