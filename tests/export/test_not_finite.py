"""What is not finite in a model is named where it would be used: export, verification, summary."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import qat
from tests.export.test_export_layers import quantized

NAMES = ["0.weight_quantizer.scale", "input_quantizer.zero_point", "0.weight", "2.bias", "1.running_var"]
X = torch.randn(4, 3, 8, 8)


def broken(name: str, value: float = math.nan) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.GELU(), nn.Conv2d(8, 4, 1)
    model = quantized(nn.Sequential(*layers), X)
    tensor = model.state_dict(keep_vars=True)[name]
    with torch.no_grad():
        tensor.view(-1)[-1] = value
    return model


@pytest.mark.parametrize("name", NAMES)
def test_export_convert_and_summary_name_it(name: str, tmp_path: Path) -> None:
    model, end = broken(name), name.rpartition(".")[2]
    writers: list[Callable[[], object]] = [
        lambda: qat.export_onnx(model, tmp_path / "model.onnx", X),
        lambda: qat.export_litert(model, tmp_path / "model.tflite", X[:1]),
        lambda: qat.convert(model),
    ]
    for write in writers:
        with pytest.raises(ValueError, match=rf"^\w+: \S*{end} of the model is not finite; load the last state"):
            write()
    assert f"{end} of the model is not finite" in qat.summary(model)


def test_verify_names_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = broken(NAMES[0], 0.01)
    qat.export_onnx(model, path, X)
    with torch.no_grad():
        model.get_parameter(NAMES[0])[3] = math.inf
    with pytest.raises(ValueError, match=r"^verify_onnx: 0.weight_quantizer.scale of the model is not finite"):
        qat.verify_onnx(path, model, [X])


def test_a_mask_may_be_infinite(tmp_path: Path) -> None:
    model = broken(NAMES[0], 0.01)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    qat.export_onnx(model, tmp_path / "model.onnx", X)
    assert "not finite" not in qat.summary(model)
