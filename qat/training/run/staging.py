"""The results of a run that goes on: written beside the old ones, and put in their place together, at the end.

config.yaml, layers.txt, model.onnx and summary.json of a finished run belong together. A run that exports again or
trains on writes its own into the folder STAGED. When all are there, STAGED is renamed to READY, which is one step; then
the files move up. Whenever the process ends, the old results are whole, or the new ones are: those that have not moved
yet lie in READY, and the next run moves them.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qat.training.run.lock import check_folder

STAGED = ".staged"
READY = ".ready"


@contextmanager
def results_of(folder: Path, finished: bool) -> Iterator[Path]:
    """Yield the folder for the results of a run that holds the lock; after an error, those of a finished run stay.

    Args:
        folder: the run folder.
        finished: whether it holds the results of a finished run. Those of a new run are written in their place at once.

    Raises:
        UserError: if the folder is no longer the one that was locked.
    """
    if not finished:
        yield folder
        return
    staged = folder / STAGED
    shutil.rmtree(staged, ignore_errors=True)  # of a run that was killed
    staged.mkdir()
    try:
        yield staged
        check_folder(folder)
        staged.rename(folder / READY)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    move_up(folder)


def is_ready(folder: Path) -> bool:
    """Whether a run was killed while its results moved up."""
    return (folder / READY).is_dir()


def move_up(folder: Path) -> None:
    """Put the results in READY in the place of the old ones."""
    for file in sorted((folder / READY).iterdir()):
        file.replace(folder / file.name)
    (folder / READY).rmdir()


def result(folder: Path, name: str) -> Path:
    """The path of one of the results, wherever it is by now; the file may be missing."""
    ready = folder / READY / name
    return ready if ready.is_file() else folder / name
