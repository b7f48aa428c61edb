"""The folder that a run writes into: a new one, or the one that it goes on in. Nothing that exists is overwritten."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from qat.training.config import RunConfig
from qat.training.errors import UserError

RUNS = Path("runs")
"""Parent of the default run folders, where the user stands."""

LAST_CHECKPOINT = "last.pt"
RESOLVED_CONFIG = "config.yaml"
"""Written at the start."""

FLOAT_WEIGHTS = "float.safetensors"
LAYERS = "layers.txt"
MODEL = "model.onnx"

SUMMARY = "summary.json"
"""Written at the very end: a folder that holds it is of a finished run."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes.

    Args:
        path: the folder; it exists and is new or empty, or holds the checkpoint.
        checkpoint: its last.pt to resume from, or None for a run from the start.
    """

    path: Path
    checkpoint: Path | None


def open_run_folder(config: RunConfig) -> RunFolder:
    """Make or find the folder of a run: `config.run_dir`, or by default runs/<name>, runs/<name>-2 and so on.

    With `resume: auto` a folder with a last.pt is gone on with: the given one, or by default that with the highest
    number. Where there is none the run starts anew.

    Args:
        config: run_dir, name and resume are read.

    Raises:
        UserError: if the folder is occupied, finished, unwritable or not a folder, or its parent is missing.
    """
    if config.run_dir is not None:
        path = Path(os.path.expanduser(config.run_dir))
        try:
            return _given_folder(path, resume=config.resume == "auto")
        except OSError as error:
            raise UserError(f"run_dir: '{path}': cannot use it ({error.strerror}); choose another") from error
    if config.name in ("", "..") or Path(config.name).name != config.name:
        raise UserError(f"name: {config.name!r} must be a plain name without slashes; to choose a place set run_dir")
    numbers = _numbered_folders(config.name)
    if config.resume == "auto":
        for number in sorted(numbers, reverse=True):
            if (numbers[number] / LAST_CHECKPOINT).is_file():
                return _resumed(numbers[number])
    return _next_folder(config.name, 1 + max(numbers, default=0))


def _given_folder(path: Path, *, resume: bool) -> RunFolder:
    if not path.exists():
        path.mkdir(parents=True)
        return RunFolder(path, None)
    if not path.is_dir():
        raise UserError(f"run_dir: '{path}' is not a folder; choose another")
    if resume and (path / LAST_CHECKPOINT).is_file():
        return _resumed(path)
    _require_writable(path)
    if any(path.iterdir()):
        if resume and (path / RESOLVED_CONFIG).is_file():
            return RunFolder(path, None)  # ours, stopped before its first epoch ended
        if resume:
            raise UserError(f"run_dir: '{path}' is not empty and has no last.pt to go on from; choose another")
        raise UserError(f"run_dir: '{path}' is not empty; choose another, or set resume=auto to go on from its last.pt")
    return RunFolder(path, None)


def _resumed(path: Path) -> RunFolder:
    if (path / SUMMARY).exists():
        raise UserError(f"{path}: this run is finished; to start a new one set resume=never and another run_dir")
    _require_writable(path)
    return RunFolder(path, path / LAST_CHECKPOINT)


def _numbered_folders(name: str) -> dict[int, Path]:
    """What exists of runs/<name> (number 1), runs/<name>-2 ..."""
    pattern = re.compile(re.escape(name) + r"(?:-([1-9]\d*))?")
    found: dict[int, Path] = {}
    try:
        for path in RUNS.iterdir() if RUNS.exists() else ():
            match = pattern.fullmatch(path.name)
            if match:
                found[int(match.group(1) or 1)] = path
    except OSError as error:
        raise UserError(f"{RUNS}: cannot read the folder of runs ({error.strerror}); set run_dir") from error
    return found


def _next_folder(name: str, number: int) -> RunFolder:
    """Create the first free folder from this number on; another run may take one at the same moment."""
    try:
        RUNS.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{RUNS}: cannot create the folder of runs ({error.strerror}); set run_dir") from error
    while True:
        path = RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"{path}: cannot create the run folder ({error.strerror}); set run_dir") from error
        else:
            return RunFolder(path, None)


def _require_writable(path: Path) -> None:
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{path}: this folder is not writable; choose another run_dir or change its permissions")
