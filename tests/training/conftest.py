"""The folder in which a test of the training script runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The current folder, with the FILES of the test's module; what was imported from them is forgotten at the end."""
    files: dict[str, str] = getattr(request.module, "FILES", {})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in files:
        sys.modules.pop(Path(name).stem, None)
