"""Every public name is on a page, in code or in backticks, and its docstring says what it is."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qat
from benchmarks.reference_table import PLACES, first_sentence

ROOT = Path(__file__).resolve().parents[2]
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
