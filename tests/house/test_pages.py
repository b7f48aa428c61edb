"""Pages that show how something is done: their Python runs from top to bottom, and does what they say."""

import json
import logging
import re
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from PIL import Image
from test_readme import ROOT, run_blocks

import qat
from qat.training import script as train
from qat.training.config.file import load_config


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
        compile(textwrap.dedent(sketch), name, "exec")  # it may stand in a list
    return names


def test_timm_and_huggingface(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page("timm_and_huggingface")
    assert capsys.readouterr().out.split("\n")[0] == "1.0"
    assert {path.name for path in place.glob("*.onnx")} == {"hf.onnx"}


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
    ordered = [float(line.split()[-1]) for line in losses.splitlines()]
    assert ordered == sorted(ordered, reverse=True) and len(ordered) == 9  # nothing at 4 bits loses least
    assert names["recipe"].for_layer("layer2.0.downsample.0").weight.bits == 8


def test_aids() -> None:
    names = run_page("aids")
    assert torch.isfinite(names["loss"]) and names["fewer"].get_submodule("0").weight_quantizer.spec.bits == 8
    assert list(names["oscillations"].weights) == ["3"] and names["count"].weights == 8 * 8 * 3 * 3
    assert names["decays"]["weights"] == 0.04 and names["decays"]["weights_2_bits"] == 0.01


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
    assert {path.name for path in place.iterdir()} == {*targets, "images.bin"}
    graph = onnx.load("tensorrt.onnx").graph
    assert {each.name for each in graph.initializer} <= {name for node in graph.node for name in node.input}
    assert (place / "images.bin").stat().st_size == names["images"].nbytes


def test_own_data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "own_data.md").read_text()
    for name, text in re.findall(r"```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)```", page, re.DOTALL):
        with (place / name).open("a") as file:
            file.write(text)
    monkeypatch.syspath_prepend(place)
    for module in ("my_data", "my_model"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert train.main(["--config", "bars.yaml", "run_dir=runs/bars", "device=cpu"]) == 0
    assert json.loads((place / "runs" / "bars" / "summary.json").read_text())["qat"]["top1"] > 90
    assert load_config("pets", [], None).data.root == "pets"
    for split in ("train", "val"):
        Image.new("RGB", (8, 8)).save(place / f"{split}.png")
        (place / f"{split}.csv").write_text(f"{split}.png,cat\n")
    data = sys.modules["my_data"].from_table(load_config("pets", [f"data.root={place}"], None).data)
    assert data.classes == ["cat"] and data.val.picture(0).size == (8, 8)


def test_troubleshooting_quotes_the_messages() -> None:
    source = "".join(path.read_text() for path in (ROOT / "qat").rglob("*.py"))
    said = re.sub(r'"\s+f?"', "", source)  # sentences go over lines
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`(.+?)`", row)]
    assert len(quoted) > 15 and [message for message in quoted if message not in said] == []
