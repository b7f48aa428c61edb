"""What the code and its documents point at is there: files by their path, and names of qat in backticks."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from qat.training.config.stages import QATStageConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("qat", "tests", "docs", "benchmarks", "configs", "examples")
PATHS = re.compile(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w/-]+\.(?:py|md|c|h|yaml|json|jsonl|png)\b")
ELSEWHERE = {
    "benchmarks/results/speed_gpu.jsonl",  # written by a run on a GPU
    "docs/usage/training_time_compression/other_algorithms/LegacyQuantization.md",  # the end of an address
    "configs/a.yaml",  # made up by a test
}
NAMES = re.compile(r"`(qat(?:\.\w+)+)")


def sources() -> list[Path]:
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    paths = [ROOT / name for name in tracked if name.endswith((".py", ".md", ".toml", ".yaml", "run"))]
    return [path for path in paths if path.exists() and path.name != "CHANGELOG.md"]  # which tells what was


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    if not (ROOT / ".git").exists():
        pytest.skip("only a clone knows which files are its own")
    return {path: path.read_text() for path in sources()}


def test_every_file_that_is_named_is_there(texts: dict[Path, str]) -> None:
    lost = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        for name in PATHS.findall(text)
        if not (ROOT / name).exists() and name not in ELSEWHERE
    }
    assert not lost


def test_every_name_of_the_library_in_backticks_is_there(texts: dict[Path, str]) -> None:
    found = {name for text in texts.values() for name in NAMES.findall(text)}
    assert len(found) > 50
    assert not {name for name in found if not _is_there(name)}


def _is_there(name: str) -> bool:
    """Whether it is a name of the package, or a key of the YAML's section `qat`."""
    parts = name.split(".")
    if parts[1] in QATStageConfig.model_fields:
        return True
    for depth in range(len(parts), 0, -1):
        try:
            here: object = importlib.import_module(".".join(parts[:depth]))
        except ImportError:
            continue
        for part in parts[depth:]:
            if not hasattr(here, part):
                return False
            here = getattr(here, part)
        return True
    return False
