"""What is there for speed alone can be deleted: everything still trains, evaluates and exports the same integers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import logging, sys
from pathlib import Path

import onnx, torch
from torch import nn

import qat

logging.basicConfig(level=logging.INFO)
given, found = map(Path, sys.argv[1:])
assert Path(qat.__file__).is_relative_to(Path.cwd()), qat.__file__

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
)
images, labels = torch.randn(32, 3, 16, 16), torch.randint(0, 5, (32,))
model = qat.prepare(net, example_inputs=images[:2])
qat.calibrate(model, [images])

model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss = nn.functional.cross_entropy(model(images), labels)
loss.backward()
grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
optimizer.step()

if not given.exists():  # the whole package trains, the others deploy what it trained
    torch.save(model.state_dict(), given)
model.load_state_dict(torch.load(given))
model.eval()
with torch.no_grad():
    answer = model(images)
qat.export_onnx(model, found.with_suffix(".onnx"), images[:2])
graph = onnx.load(found.with_suffix('.onnx')).graph
initializers = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
torch.save({"loss": loss.item(), "grads": grads, "answer": answer, "initializers": initializers}, found)
"""


def without(tmp_path: Path, *paths: str) -> Path:
    """A folder with a copy of the package that lacks some files or folders, named from `qat` on."""
    shutil.copytree(ROOT / "qat", tmp_path / "qat", ignore=shutil.ignore_patterns("__pycache__"))
    for path in paths:
        target = tmp_path / "qat" / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    return tmp_path


def run(folder: Path, weights: Path) -> dict[str, Any]:
    """What `PROGRAM` finds with the copy of the package in a folder."""
    found = folder / "found.pt"
    command = [sys.executable, "-c", PROGRAM, str(weights), str(found)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**torch.load(found, weights_only=False), "log": done.stderr}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The weights that the whole package trained, and what it found with them."""
    weights = tmp_path_factory.mktemp("weights") / "trained.pt"
    return weights, run(without(tmp_path_factory.mktemp("whole")), weights)


def check_same(found: dict[str, Any], expected: dict[str, Any], share: float) -> None:
    """The same answers and numbers in the ONNX file, to the bit; loss and gradients up to a share of the largest."""
    assert torch.equal(found["answer"], expected["answer"])
    assert abs(found["loss"] - expected["loss"]) <= share * expected["loss"]
    assert found["grads"].keys() == expected["grads"].keys()
    for name, grad in expected["grads"].items():
        off = (found["grads"][name] - grad).abs().max()
        assert off <= share * grad.abs().max(), f"the gradient of {name} is off by {off}"
    assert found["initializers"].keys() == expected["initializers"].keys()
    for name, numbers in expected["initializers"].items():
        assert found["initializers"][name].dtype == numbers.dtype, name
        assert (found["initializers"][name] == numbers).all(), name


def test_without_the_c_sources(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    sources = [f"kernels/cpu/{path.name}" for path in (ROOT / "qat" / "kernels" / "cpu").glob("*.[ch]")]
    assert sources
    weights, expected = whole
    found = run(without(tmp_path, *sources), weights)
    check_same(found, expected, share=1e-3)  # sums in another order
    assert "the C kernels could not be built" in found["log"]


def test_without_the_fused_engine(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = without(tmp_path, "codes")
    workflow = folder / "qat" / "workflow.py"
    lines = workflow.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "qat.codes" not in line]
    assert len(kept) == len(lines) - 1
    workflow.write_text("".join(kept))
    assert not any("import qat.codes" in text or "from qat.codes" in text for text in _texts(folder / "qat"))
    weights, expected = whole
    check_same(run(folder, weights), expected, share=1e-3)  # sums in another order


def _texts(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*.py")]
