"""Models of other libraries as they come, where these are installed: pages, examples, answers, files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```python sketch\n(.*?)^```", (ROOT / "docs/timm_and_huggingface.md").read_text(), re.MULTILINE | re.DOTALL
)


def ran(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("library", ["transformers", "ultralytics"])
def test_the_lines_of_the_page_make_a_file(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    (block,) = [block for block in BLOCKS if library in block]
    ran(block, tmp_path)
    assert list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    "library, example", [("transformers", "huggingface_trainer"), ("ultralytics", "ultralytics_yolo")]
)
def test_the_example_trains_and_its_file_answers_the_same(library: str, example: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    if library == "transformers":
        pytest.importorskip("accelerate")
    shown = ran((ROOT / "examples" / f"{example}.py").read_text(), tmp_path)
    assert "agreement=1.0," in shown or shown.endswith("\n0 answers differ by more than ties\n")
    losses = [float(loss) for loss in re.findall(r"'?(?:eval_)?loss'?:? '?([\d.]+)", shown)]
    assert losses[-1] < losses[0]
