"""What `export_onnx` cannot write, or has to look into, in a sentence with a way out; what is not finite."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import qat
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw, refused

X = draw(4, 8)


def net(forward: Callable[..., Any]) -> Plain:
    return Plain(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 3))


def test_what_torch_cannot_export_is_one_line_of_its_reason(tmp_path: Path) -> None:
    model = quantized(net(lambda self, x: torch.linalg.eigvals(self.a(x).mT @ self.a(x)).real), X)
    with pytest.raises(ValueError, match=r"^export_onnx: torch.onnx cannot export Plain: [^\n\x1b]*eig[^\n\x1b]*$"):
        qat.export_onnx(model, tmp_path / "x.onnx", X)
    with refused("export_onnx: Plain returns 3 beside tensors, which no file holds"):
        qat.export_onnx(quantized(net(lambda self, x: {"y": self.a(x), "n": 3}), X), tmp_path / "x.onnx", X)


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, torch.compile])
def test_what_torch_wraps_around_a_model_is_not_in_the_file(wrap: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = quantized(net(lambda self, x: self.b(self.a(x).relu())), X)
    path = tmp_path / "x.onnx"
    qat.export_onnx(wrap(model), path, X)  # a warning that the batch is fixed would be an error here
    graph = onnx.load(path).graph
    assert "a_quantizer" in {output for node in graph.node for output in node.output}
    assert qat.verify_onnx(path, model, [X, draw(7, 8)]).agreement == 1


def test_a_place_where_no_file_can_be_written_is_refused(tmp_path: Path) -> None:
    sentence = f"export_onnx: there is no folder '{tmp_path}/none' to write to; create it first"
    with refused(sentence, FileNotFoundError):
        qat.export_onnx(nn.Identity(), tmp_path / "none" / "x.onnx", X)
    with refused(f"export_onnx: '{tmp_path}' is a folder; give the file in it, such as model.onnx", IsADirectoryError):
        qat.export_onnx(nn.Identity(), tmp_path, X)


NAMES = ["0.weight_quantizer.scale", "input_quantizer.zero_point", "0.weight", "2.bias", "1.running_var"]
IMAGES = torch.randn(4, 3, 8, 8)


def broken(name: str, value: float = math.nan) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.GELU(), nn.Conv2d(8, 4, 1)
    model = quantized(nn.Sequential(*layers), IMAGES)
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name].view(-1)[-1] = value
    return model


@pytest.mark.parametrize("name", NAMES)
def test_export_convert_and_summary_name_it(name: str, tmp_path: Path) -> None:
    model, end = broken(name), name.rpartition(".")[2]
    for write in (
        lambda: qat.export_onnx(model, tmp_path / "model.onnx", IMAGES),
        lambda: qat.export_litert(model, tmp_path / "model.tflite", IMAGES[:1]),
        lambda: qat.convert(model),
    ):
        with pytest.raises(ValueError, match=rf"^\w+: \S*{end} of the model is not finite; load the last state"):
            write()
    assert f"{end} of the model is not finite" in qat.summary(model)


def test_verify_names_it_and_a_mask_may_be_infinite(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = broken(NAMES[0], 0.01)
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    qat.export_onnx(model, path, IMAGES)
    assert "not finite" not in qat.summary(model)
    with torch.no_grad():
        model.get_parameter(NAMES[0])[3] = math.inf
    with pytest.raises(ValueError, match=r"^verify_onnx: 0.weight_quantizer.scale of the model is not finite"):
        qat.verify_onnx(path, model, [IMAGES])


def test_without_ai_edge_litert_one_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("export_litert: ai-edge-litert is not installed; pip install ste-qat[litert]", ImportError):
        qat.export_litert(nn.Linear(2, 2), tmp_path / "model.tflite", torch.zeros(1, 2))
