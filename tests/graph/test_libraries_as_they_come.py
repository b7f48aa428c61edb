"""Models of other libraries as they come, where these are installed: the lines of the page."""

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


@pytest.mark.parametrize("library", ["transformers", "ultralytics"])
def test_the_lines_of_the_page_make_a_file(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    (block,) = [block for block in BLOCKS if library in block]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.onnx"))
