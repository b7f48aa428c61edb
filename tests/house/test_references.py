"""What code and documents point at is there; every public name is on a page, and its docstring says what it is."""

import importlib
import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qat
from benchmarks.reference_table import PLACES, first_sentence
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


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
WORDS = {word for page in PAGES for code in CODE.findall(page.read_text()) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_is_on_a_page(place: str) -> None:
    missing = sorted(set(importlib.import_module(place).__all__) - WORDS)
    assert not missing, f"{place}: on no page: {missing}; run python -m benchmarks.document for docs/reference.md"


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_says_what_it_is(place: str) -> None:
    package = importlib.import_module(place)
    silent = [name for name in package.__all__ if len(first_sentence(package, name).split()) < 3]
    assert not silent, f"{place}: no sentence in the docstring of {silent}"


def test_every_public_package_is_listed() -> None:
    """A package that says `__all__` is public."""
    inner = {"qat.analysis"}  # all of it is offered by `qat`
    packages = (ROOT / "qat").glob("*/__init__.py")
    found = {f"qat.{path.parent.name}" for path in packages if "__all__" in path.read_text()}
    assert found - inner == set(PLACES) - {"qat"}


TAKING_MODELS = {
    name: getattr(package, name)
    for package in (qat, qat.export)
    for name in package.__all__
    if inspect.isfunction(getattr(package, name)) and "model" in inspect.signature(getattr(package, name)).parameters
}


@pytest.mark.parametrize("name", sorted(TAKING_MODELS))
def test_what_is_no_model_is_refused_in_a_sentence(name: str) -> None:
    function: Callable[..., Any] = TAKING_MODELS[name]
    needed = {key for key, each in inspect.signature(function).parameters.items() if each.default is each.empty}
    others = dict.fromkeys(needed - {"model", "args", "kwargs"}, "model.onnx")
    for wrong, kind in (([torch.zeros(1)], "list"), (nn.Linear, "the class Linear")):
        with pytest.raises(TypeError, match=f"^{name}: model must be a torch.nn.Module, got {kind}$"):
            function(model=wrong, **others)
