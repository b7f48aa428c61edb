"""docs/run_folder.md is true: its code predicts the same with torch and without, and its commands go on with a run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import qat
from qat.training.data.loaders import load_data

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "run_folder.md").read_text()
WITH_TORCH, WITHOUT_TORCH, EXPLAINED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SAVED = """
import sys
assert "torch" not in sys.modules and "qat" not in sys.modules
np.savez("seen.npz", input=transform(Image.open("photo.png")), scores=scores)
"""


@pytest.fixture
def place(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the run, where the test stands, and an image of the validation split."""
    shutil.copytree(pets / "runs", tmp_path / "runs")
    shutil.copyfile(pets / "images" / "val" / "dog" / "2.png", tmp_path / "photo.png")
    shutil.copyfile(pets / "pets.yaml", tmp_path / "pets.yaml")
    (tmp_path / "images").symlink_to(pets / "images")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_same_prediction_with_torch_and_without(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session: dict[str, object] = {}
    exec(compile(WITH_TORCH, "run_folder.md", "exec"), session)
    named = capsys.readouterr().out
    assert len(WITH_TORCH.strip().splitlines()) == 5  # the import, a blank line, and three lines
    assert named.strip() in ("cat", "dog", "ship")

    (place / "predict.py").write_text(WITHOUT_TORCH + SAVED)
    shown = subprocess.run([sys.executable, "predict.py"], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, named), shown.stderr
    seen = np.load("seen.npz")

    model = session["model"]
    config = model.config  # type: ignore[attr-defined]
    data = load_data(config.data, config.seed, torch.device("cpu"), channels_last=True)
    validated = torch.cat([images for images, _ in data.val])[6:7]  # cat has 4 images, and dog 2 before this one
    for tensor in (torch.from_numpy(seen["input"]), model.transform("photo.png")):  # type: ignore[attr-defined]
        assert torch.equal(tensor, validated)
    torch.testing.assert_close(torch.from_numpy(seen["scores"]), session["scores"], rtol=0, atol=1e-4)


def test_differences_are_explained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXPLAINED, "run_folder.md", "exec"), {"qat": qat})
    assert capsys.readouterr().out.endswith(" of 64 predictions differ, 0 of them without a near-tie\n")


def test_the_metadata_are_those_of_the_page_and_of_the_summary(place: Path) -> None:
    found = {each.key: json.loads(each.value) for each in onnx.load("runs/pets/model.onnx").metadata_props}
    (rows,) = re.findall(r"\| key of the metadata \|.*?\n\n", PAGE, re.DOTALL)
    keys = [key for cell in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for key in re.findall(r"`(\w+)`", cell)]
    assert set(keys) == found.keys() and len(keys) == len(found)
    assert found["classes"] == ["cat", "dog", "ship"] and found["model"] == "squeezenet1_1"
    assert (found["image_size"], found["resize_size"], found["resized_by"]) == (48, 52, "pillow")
    summary = json.loads(Path("runs/pets/summary.json").read_text())
    assert {**summary["about"], "versions": summary["versions"]}.items() <= found.items()
    assert found["accuracy"] == {name: summary[name]["top1"] for name in ("float", "calibrated", "qat")}
    assert (found["weights"], found["epoch"], found["epochs"]) == ("last", 3, 3)
    assert torch.load("runs/pets/best.pt", weights_only=True)["about"]["versions"]["qat"] == qat.__version__
