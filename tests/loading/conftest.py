"""Two finished runs of `train.py`, and the float model of the second."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runs.finished_runs import own_fixture, pets_fixture  # noqa: F401


@pytest.fixture
def tiny(own: Path) -> Iterator[Callable[..., object]]:
    """The function that builds the float model of runs/own."""
    names: dict[str, Callable[..., object]] = {}
    exec((own / "tinymodels.py").read_text(), names)
    yield names["tiny"]
