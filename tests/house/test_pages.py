"""Pages that show how something is done: their Python runs from top to bottom, and does what they say."""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from test_readme import ROOT, run_blocks

import qat


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a page writes its files."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


def run_page(name: str) -> dict[str, Any]:
    """Everything that the page defines, once its blocks have run; what needs other libraries is only compiled."""
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(run_blocks(f"docs/{name}.md", names))
    for sketch in re.findall(r"```python sketch\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL):
        compile(sketch, name, "exec")
    return names


def test_timm_and_huggingface(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("timm_and_huggingface")
    assert capsys.readouterr().out.split("\n")[:3] == ["in parts: True", "in parts: False", "1.0"]
    assert {path.name for path in place.glob("*.onnx")} == {"timm.onnx", "hf.onnx"}
    block = names["Block"](4).eval()
    x = torch.randn(2, 4, 5, 5)
    expected = block(x)
    assert torch.equal(names["taken_apart"](block)(x), expected)


@pytest.mark.slow
def test_detection(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("detection")
    parts, agreement, boxes = capsys.readouterr().out.splitlines()
    assert parts == "['backbone', 'head']" and float(agreement) >= 0.999
    assert boxes.endswith("True") and int(boxes.split()[0]) == len(names["expected"]["boxes"]) > 0


def test_choosing_bits(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page("choosing_bits")
    table, _, losses = capsys.readouterr().out.partition("parameters\n")
    assert "fc " in table and "stays float" not in table
    ordered = [float(line.split()[1]) for line in losses.splitlines()]
    assert ordered == sorted(ordered, reverse=True) and len(ordered) == 5  # nothing at 4 bits loses least
    assert names["recipe"].for_layer("layer2.0.downsample.0").weight.bits == 8


def test_coming_over(capsys: pytest.CaptureFixture[str]) -> None:
    model = run_page("coming_over")["model"]
    assert capsys.readouterr().out == "int8\nTrue []\n"
    quantizers = [module for module in model.modules() if isinstance(module, qat.Quantizer)]
    assert {(each.role, each.spec.rule) for each in quantizers} == {("weight", "minmax"), ("activation", "ema")}


def test_deploying(place: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        names = run_page("deploying")
    assert capsys.readouterr().out.split() == ["1.0", "1.0"]
    targets = {f"{target}.{ending}" for target in ("onnxruntime", "openvino", "tensorrt") for ending in ("onnx", "npz")}
    assert {path.name for path in place.iterdir()} == {*targets, "for_tensorrt.onnx", "images.bin"}
    graph = onnx.load("for_tensorrt.onnx").graph
    assert {each.name for each in graph.initializer} <= {name for node in graph.node for name in node.input}
    assert (place / "images.bin").stat().st_size == names["images"].nbytes
