"""The folder that a run writes into: a new one, or its own when it resumes. Files of other runs are never touched."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from qat.training.config.file import load_config
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.run.checkpoint import check_same_config
from qat.training.run.files import temporary_of
from qat.training.run.lock import LOCK, FolderInUseError, RunLock

RUNS = Path("runs")
"""Parent of the default run folders, relative to the current folder."""

LAST_CHECKPOINT = "last.pt"
BEST_CHECKPOINT = "best.pt"
"""The weights of QAT's best epoch, as evaluated; without an epoch, the calibrated model."""

RESOLVED_CONFIG = "config.yaml"
"""The config with all defaults, written at the start."""

FLOAT_WEIGHTS = "float.safetensors"
LAYERS = "layers.txt"
MODEL = "model.onnx"

SUMMARY = "summary.json"
"""Written at the very end: a run folder with this file is finished. A run that goes on removes it first."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run; a context manager that releases the lock at the end.

    Args:
        path: the folder; it exists and is new or empty, or contains the checkpoint. The path of a locked folder is
            absolute, so that a chdir does not matter.
        checkpoint: its last.pt to resume from, or None for a new run.
        finished: the exit status of the finished run in the folder, or None if there is something left to do.
        lock: keeps other runs out; None for a finished run.
    """

    path: Path
    checkpoint: Path | None
    finished: int | None = None
    lock: RunLock | None = field(default=None, compare=False)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            self.lock.release()


def open_run_folder(config: RunConfig) -> RunFolder:
    """Create or find the folder of a run: `config.run_dir`, or by default runs/<name>, runs/<name>-2 and so on.

    With `resume: auto`, the run continues in the given folder, or by default in the one with the highest number, if it
    has a last.pt. If there is none, a new run starts; if the run is finished, there is nothing to do.

    Raises:
        UserError: if the folder is occupied, in use, unwritable or not a folder, its parent is missing, or it contains
            a finished run with another config.
    """
    if config.run_dir is not None:
        path = Path(os.path.expanduser(config.run_dir))
        try:
            return _given_folder(path, config)
        except OSError as error:
            raise UserError(f"run_dir: '{path}': cannot use it ({error.strerror}); choose another") from error
    if config.name in ("", "..") or Path(config.name).name != config.name:
        raise UserError(f"name: {config.name!r} must be a plain name without slashes; to choose a place set run_dir")
    numbers = _numbered_folders(config.name)
    if config.resume == "auto":
        for number in sorted(numbers, reverse=True):
            if any((numbers[number] / name).is_file() for name in (LAST_CHECKPOINT, SUMMARY)):
                return _given_folder(numbers[number], config)
    return _next_folder(config, 1 + max(numbers, default=0))


def _given_folder(path: Path, config: RunConfig) -> RunFolder:
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        raise UserError(f"run_dir: '{path}' is not a folder; choose another")
    finished = _finished(path, config) if config.resume == "auto" else None
    return RunFolder(path, None, finished) if finished is not None else _locked(path, config)


def _locked(path: Path, config: RunConfig) -> RunFolder:
    """Lock a folder. It is checked before, so that nothing is written into a refused folder, and after locking."""
    _checkpoint(path, config)
    lock = RunLock(path)
    try:
        return RunFolder(lock.folder, _checkpoint(path, config), lock=lock)
    except BaseException:
        lock.release()
        raise


def _checkpoint(path: Path, config: RunConfig) -> Path | None:
    """The checkpoint that a run in this folder resumes from; None if it is a new run."""
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"{path}: this folder is not writable; choose another run_dir or change its permissions")
    resume = config.resume == "auto"
    if resume and (path / LAST_CHECKPOINT).is_file():
        return path / LAST_CHECKPOINT
    # A run that was killed before it wrote its config leaves these files.
    leftovers = {LOCK, temporary_of(path / RESOLVED_CONFIG).name}
    if {entry.name for entry in path.iterdir()} <= leftovers:
        return None
    if resume and (path / RESOLVED_CONFIG).is_file():
        return None  # this run, stopped before the end of its first epoch
    if resume:
        raise UserError(f"run_dir: '{path}' is not empty and has no last.pt to go on from; choose another")
    raise UserError(f"run_dir: '{path}' is not empty; choose another, or set resume=auto to go on from its last.pt")


def _finished(path: Path, config: RunConfig) -> int | None:
    """The exit status of the run in this folder, if it has done everything that the config asks for.

    More epochs of QAT, or another `export`, are something left to do.

    Raises:
        UserError: if it was a run with another config.
    """
    try:
        summary = json.loads((path / SUMMARY).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # missing or truncated: the run repeats its end
        return None
    if not isinstance(summary, dict):
        return None
    saved = load_config(str(path / RESOLVED_CONFIG))
    check_same_config(path / RESOLVED_CONFIG, saved.model_dump(mode="json"), config)
    without_onnx = saved.export.model_copy(update={"onnx": False})
    exported = config.export in (saved.export, without_onnx) and ("onnx" in summary or not config.export.onnx)
    if not exported or config.qat.epochs != saved.qat.epochs:
        return None
    return int(summary.get("exit_status", 0))


def _numbered_folders(name: str) -> dict[int, Path]:
    """The existing folders among runs/<name> (number 1), runs/<name>-2 ..., by number."""
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


def _next_folder(config: RunConfig, number: int) -> RunFolder:
    """Create the first free folder from this number on; another run may take one at the same time."""
    try:
        RUNS.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{RUNS}: cannot create the folder of runs ({error.strerror}); set run_dir") from error
    while True:
        path = RUNS / (config.name if number == 1 else f"{config.name}-{number}")
        try:
            path.mkdir()
            return _locked(path, config)
        except (FileExistsError, FolderInUseError):
            number += 1
        except OSError as error:
            raise UserError(f"{path}: cannot create the run folder ({error.strerror}); set run_dir") from error
