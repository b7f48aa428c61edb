"""Two finished runs of `train.py`, and the float model of the second."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from finished_runs import run_own, run_pets


@pytest.fixture(scope="package")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pets.yaml, images/ and the run runs/pets."""
    return run_pets(tmp_path_factory.mktemp("pets"))


@pytest.fixture(scope="package")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with own.yaml, tinymodels.py and the run runs/own: averaged weights, statistics estimated anew."""
    return run_own(tmp_path_factory.mktemp("own"))


@pytest.fixture
def tiny(own: Path) -> Iterator[Callable[..., object]]:
    """The function that builds the float model of runs/own."""
    names: dict[str, Callable[..., object]] = {}
    exec((own / "tinymodels.py").read_text(), names)
    yield names["tiny"]
