"""Two finished runs of `train.py`, which the verbs are tried on, and the way to call one."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qat.cli.command import main
from tests.runs.finished_runs import own_fixture, pets_fixture  # noqa: F401
from tests.runs.tiny_training import Captured, Patch

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verb(pets: Path, monkeypatch: Patch, capsys: Captured) -> Iterator[Verb]:
    """Call a verb in the folder of runs/pets, or another: its status, standard output and standard error."""

    def call(*arguments: str, place: Path = pets) -> tuple[int, str, str]:
        monkeypatch.chdir(place)
        capsys.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as error:  # argparse's own
            status = int(error.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    yield call
    sys.modules.pop("tinymodels", None)
