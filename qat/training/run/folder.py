"""The folder that a run writes into: a new one, or its own when it resumes. Files of other runs are never touched."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qat.training.config.file import NULLS, load_config
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.run.checkpoint import check_same_config
from qat.training.run.files import FolderInUseError, RunLock
from qat.training.run.logging import CURVES

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
REPORT, PICTURES, RESULTS, ANALYSIS = "report.html", "figures", "results.png", "analysis.json"
"""The report, its figures as PNG and that of all curves, and what the report shows besides curves and results."""

SENSITIVITY, EVALUATION, LATENCY = "sensitivity.json", "evaluation.json", "benchmark.json"
"""What the verbs `sensitivity`, `evaluate` and `benchmark` have measured."""

SUMMARY = "summary.json"
"""Written at the very end, and removed by a run that goes on: a folder with it holds the results of a finished run."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run; a context manager that releases the lock at the end."""

    path: Path  # of a locked one absolute: a user may chdir
    checkpoint: Path | None
    finished: int | None = None  # the exit status of the finished run in it
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
    """
    if config.run_dir is None and (config.name in ("", "..") or Path(config.name).name != config.name):
        raise UserError(f"name: {config.name!r} must be a plain name without slashes; to choose a place set run_dir")
    path = RUNS if config.run_dir is None else Path(os.path.expanduser(config.run_dir))
    try:
        if config.run_dir is not None:
            return _given_folder(path, config)
        numbers = _numbered_folders(config.name)
        newest = _newest_run(numbers) if config.resume == "auto" else None
        return _given_folder(newest, config) if newest else _next_folder(config, 1 + max(numbers, default=0))
    except OSError as error:
        raise UserError(f"run_dir: '{path}': cannot use it ({error.strerror}); choose another") from error


def goes_on(config: RunConfig) -> bool:
    """Whether a run with this config has a last.pt to go on from, and so needs no float weights from elsewhere."""
    if config.resume != "auto":
        return False
    given = config.run_dir and Path(os.path.expanduser(config.run_dir))
    path = given or _newest_run(_numbered_folders(config.name))
    return path is not None and os.path.isfile(path / LAST_CHECKPOINT)  # os.path: False, no error, without permission


def _newest_run(numbers: dict[int, Path]) -> Path | None:
    """The folder with the highest number that has something to go on from."""
    for number in sorted(numbers, reverse=True):
        if any((numbers[number] / name).is_file() for name in (LAST_CHECKPOINT, SUMMARY)):
            return numbers[number]
    return None


def _given_folder(path: Path, config: RunConfig) -> RunFolder:
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        raise UserError(f"run_dir: '{path}' is not a folder; choose another")
    finished = _finished(path, config) if config.resume == "auto" else None
    return RunFolder(path, None, finished) if finished is not None else _locked(path, config)


def _locked(path: Path, config: RunConfig) -> RunFolder:
    lock = RunLock(path)
    try:
        return RunFolder(lock.folder, _checkpoint(path, config), lock=lock)
    except BaseException:
        lock.release()
        raise


def _checkpoint(path: Path, config: RunConfig) -> Path | None:
    """The checkpoint that a run in this folder resumes from; None if it is a new run."""
    resume, last = config.resume == "auto", path / LAST_CHECKPOINT
    if last.is_file():
        if resume:
            return last
        raise UserError(f"run_dir: '{path}' is not empty; choose another, or set resume=auto to go on from its last.pt")
    if _nothing_trained(path, resume):
        return None
    what = "is not empty and has no last.pt to go on from" if resume else "is not empty"
    raise UserError(f"run_dir: '{path}' {what}; choose another")


def _nothing_trained(path: Path, resume: bool) -> bool:
    """Whether a folder is empty, or holds only what a start leaves that ended before its first last.pt.

    A run may start there again, with another config too. Files that this program did not write, trained weights and a
    finished run are never touched; only what calibration made, without training, is made again by a run that resumes.
    """
    names = {entry.name for entry in path.iterdir() if entry.name[0] != "."}
    file = path / RESOLVED_CONFIG
    if RESOLVED_CONFIG not in names or not file.read_text(encoding="utf-8").startswith(f"# {NULLS}"):
        return not names  # a config.yaml may be the user's own
    saved = load_config(str(file))
    again = {RESOLVED_CONFIG, LAYERS, CURVES}
    if saved.float.epochs == 0:
        again.add(FLOAT_WEIGHTS)
        if saved.qat.epochs == 0 and resume:
            again |= {BEST_CHECKPOINT, MODEL, SUMMARY, REPORT, PICTURES, RESULTS, ANALYSIS}
            again |= {SENSITIVITY, EVALUATION, LATENCY}
    return names <= again


def _finished(path: Path, config: RunConfig) -> int | None:
    """The exit status of the run in this folder, if it has done everything that the config asks for."""
    summary = read_summary(path)
    if summary is None:  # the run repeats its end
        return None
    saved = load_config(str(path / RESOLVED_CONFIG))
    check_same_config(path / RESOLVED_CONFIG, saved.model_dump(mode="json"), config)
    without_onnx = saved.export.model_copy(update={"onnx": False})
    exported = config.export in (saved.export, without_onnx) and ("onnx" in summary or not config.export.onnx)
    if not exported or config.qat.epochs != saved.qat.epochs:
        return None
    return int(summary.get("exit_status", 0))


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of the finished run in a folder; None if it is missing or truncated."""
    try:
        summary = json.loads((path / SUMMARY).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def _numbered_folders(name: str) -> dict[int, Path]:
    """The existing folders among runs/<name> (number 1), runs/<name>-2 ..., by number."""
    pattern = re.compile(re.escape(name) + r"(?:-([1-9]\d*))?")
    matches = [(pattern.fullmatch(path.name), path) for path in (RUNS.iterdir() if RUNS.exists() else ())]
    return {int(match.group(1) or 1): path for match, path in matches if match}


def _next_folder(config: RunConfig, number: int) -> RunFolder:
    """Create the first free folder from this number on; another run may take one at the same time."""
    RUNS.mkdir(exist_ok=True)
    while True:
        path = RUNS / (config.name if number == 1 else f"{config.name}-{number}")
        try:
            path.mkdir()
            return _locked(path, config)
        except (FileExistsError, FolderInUseError):
            number += 1
