"""Every public name is on a page, in code or in backticks, and its docstring says what it is."""

import importlib
import re
from pathlib import Path

import pytest

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
