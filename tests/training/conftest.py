"""The folder in which a test of the training script runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.small_run import standing_in


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The current folder, with the FILES of the test's module."""
    with standing_in(tmp_path, getattr(request.module, "FILES", {})):
        yield tmp_path
