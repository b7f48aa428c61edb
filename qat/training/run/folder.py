"""Folder of a run: its choice, its lock, and its files, written atomically."""

import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError

from qat.atomic_write import atomic_write
from qat.collectives import rank
from qat.training.config.file import NULLS, flat, load_config
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.run.logging import CURVES

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("qat")
Json: TypeAlias = dict[str, Any]  # an object of a JSON file: plain values
State: TypeAlias = dict[str, Any]  # tensors and plain values, as in a checkpoint
RUNS = Path("runs")  # parent of the default run folders, relative to the current folder
LAST_CHECKPOINT = "last.pt"
BEST_CHECKPOINT = "best.pt"  # the weights of QAT's best epoch, as evaluated; without an epoch, the calibrated model
RESOLVED_CONFIG = "config.yaml"  # the config with all defaults, written at the start
FLOAT_WEIGHTS = "float.safetensors"
LAYERS = "layers.txt"
MODEL = "model.onnx"
REPORT = "report.html"
PICTURES = "figures"  # those of the report as PNG
RESULTS = "results.png"
ANALYSIS = "analysis.json"  # what the report shows besides curves and results
DRAWN = "answers.png"  # masks or boxes drawn, for the report
SENSITIVITY, LATENCY = "sensitivity.json", "benchmark.json"  # measured by these verbs
SUMMARY = "summary.json"  # written at the very end, and removed by a run that goes on: it marks a finished run

# Keys that may differ when a run is resumed: they say where and how fast it trains, not what. `check_same_data`
# compares the images in data.root.
KEYS_FREE_ON_RESUME = (
    "name", "run_dir", "resume", "device", "log_every", "export", "channels_last", "compile", "cuda_graphs",
    "checkpoint_every", "watch", "integer_forward", "data.root", "data.workers", "data.download",
    "data.eval_batch_size",
)  # fmt: skip
EPOCHS = "qat.epochs"  # may grow when a run is resumed: the run then trains on
LOCK = ".lock"  # the locked file in a run folder; a run that ends normally removes it
_held: "dict[str, RunLock]" = {}  # by real path: the system's locks separate processes, not threads
_guard = threading.Lock()


class FolderInUseError(UserError):
    """Raised if another run writes into the folder."""


class RunLock:
    """Exclusive right to write into a folder; FolderInUseError if another has it."""

    # A POSIX lock (`lockf`) is not inherited by loader processes, which survive a killed parent for seconds. That of
    # the library filelock (`flock`) would be.

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise UserError(f"{folder}: a run needs POSIX's file locks, which are missing; use Linux, macOS or WSL")
        self.folder = folder.absolute()  # a user's code may chdir
        self.path, self._key = self.folder / LOCK, os.path.realpath(folder)
        with _guard:
            if self._key in _held or not self._is_locked():
                what = "another run writes there; wait for its end, or choose another run_dir"
                raise FolderInUseError(f"{self.folder}: {what}")
            _held[self._key] = self

    def _is_locked(self) -> bool:
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # another process has it
            os.close(self.descriptor)
            return False
        except OSError as error:
            logger.warning("%s: no locks here (%s); nothing keeps a second run out", self.path, error.strerror)
        if self.is_there():
            return True
        os.close(self.descriptor)  # its last holder removed the file after it was opened
        return self._is_locked()

    def is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        with _guard:
            if _held.get(self._key) is self:
                del _held[self._key]
                with suppress(OSError):  # an error here would hide the run's own, and a remaining file locks nothing
                    if self.is_there():
                        self.path.unlink()
                os.close(self.descriptor)


def check_folder(folder: Path) -> None:
    """Refuse to write into a folder that was moved or replaced since it was locked."""
    for lock in list(_held.values()):  # compared by name: a link may lead elsewhere by now
        if lock.folder in (folder.absolute(), *folder.absolute().parents) and not lock.is_there():
            raise UserError(
                f"{lock.folder}: the run folder or its {LOCK} was moved, deleted or replaced while the run wrote there;"
                " the run ends, so that it does not write into another's"
            )


def write_text(path: Path, text: str) -> None:
    """On rank 0, write a text file as UTF-8, atomically."""
    if rank() == 0:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    check_folder(path.parent)
    try:
        # One name for all runs: what a killed run leaves is replaced by the next.
        with atomic_write(path, path.with_name(f".{path.name}.tmp")) as temporary:
            yield temporary
            check_folder(path.parent)  # again, because writing may take minutes, as for an export
    except SafetensorError as error:
        raise UserError(f"{path}: cannot write it ({error})") from error
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while not isinstance(cause, OSError):  # torch wraps it in errors of its own
            if cause is None:
                raise
            cause = cause.__context__
        raise UserError(f"{path}: cannot write it ({cause.strerror or cause})") from error


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run; as a context manager it releases the lock at the end."""

    path: Path  # absolute if locked
    checkpoint: Path | None
    finished: int | None = None  # exit status of a finished run in it
    lock: RunLock | None = field(default=None, compare=False)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            self.lock.release()


def open_run_folder(config: RunConfig) -> RunFolder:
    """Create or find the folder of a run.

    It is `config.run_dir`, or by default runs/<name>, runs/<name>-2 and so on. With `resume: auto`, the run continues
    in the given folder, or by default in the one with the highest number, if it has a last.pt. If there is none, a new
    run starts; if the run is finished, there is nothing to do.
    """
    path = RUNS if config.run_dir is None else Path(os.path.expanduser(config.run_dir))
    try:
        if config.run_dir is not None:
            return _given_folder(path, config)
        numbers = _numbered_folders(config.name)
        newest = _newest_run(numbers) if config.resume == "auto" else None
        return _given_folder(newest, config) if newest else _next_folder(config, 1 + max(numbers, default=0))
    except OSError as error:
        raise UserError(f"run_dir: '{path}': cannot use it ({error.strerror}); choose another") from error


def continues(config: RunConfig, dry: bool = False) -> bool:
    """Return True if a run with this config has a last.pt to go on from; refuse a folder that it cannot have."""
    if config.run_dir is None and (config.name in ("", "..") or Path(config.name).name != config.name):
        raise UserError(f"name: {config.name!r} must be a plain name without slashes; to choose a place set run_dir")
    given = config.run_dir and Path(os.path.expanduser(config.run_dir))
    if config.resume != "auto":
        if given and not dry and given.is_dir() and os.access(given, os.R_OK):
            _checkpoint(given, config)
        return False
    path = given or _newest_run(_numbered_folders(config.name))
    # Without permission, os.path.isfile is False where Path.is_file raises.
    return path is not None and os.path.isfile(path / LAST_CHECKPOINT)


def _newest_run(numbers: dict[int, Path]) -> Path | None:
    newest = (path for _, path in sorted(numbers.items(), reverse=True))
    return next((path for path in newest if (path / LAST_CHECKPOINT).is_file() or (path / SUMMARY).is_file()), None)


def _given_folder(path: Path, config: RunConfig) -> RunFolder:
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir: '{path}' is not a folder; choose another")
    path.mkdir(parents=True, exist_ok=True)
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
    # True for a folder that is empty, or holds only what a start leaves that ended before its first last.pt. A run may
    # start there again, with another config too. Files of others, trained weights and a finished run are never touched.
    # What calibration made without training is made again only by a run that resumes.
    names = {entry.name for entry in path.iterdir() if entry.name[0] != "."}
    file = path / RESOLVED_CONFIG
    if RESOLVED_CONFIG not in names or not file.read_text(encoding="utf-8").startswith(f"# {NULLS}"):
        return not names  # a config.yaml may be the user's own
    saved = load_config(str(file))
    again = {RESOLVED_CONFIG, LAYERS, CURVES}
    if saved.float.epochs == 0:
        again.add(FLOAT_WEIGHTS)
        if saved.qat.epochs == 0 and resume:
            again |= {BEST_CHECKPOINT, MODEL, REPORT, PICTURES, RESULTS, ANALYSIS, DRAWN, SUMMARY, SENSITIVITY, LATENCY}
    return names <= again


def _finished(path: Path, config: RunConfig) -> int | None:
    summary = read_summary(path)
    if summary is None:  # the run did not reach its end, which is repeated
        return None
    saved = load_config(str(path / RESOLVED_CONFIG))
    check_same_config(path / RESOLVED_CONFIG, saved.model_dump(mode="json"), config)
    without_onnx = saved.export.model_copy(update={"onnx": False})
    exported = config.export in (saved.export, without_onnx) and ("onnx" in summary or not config.export.onnx)
    if not exported or config.qat.epochs != saved.qat.epochs:
        return None
    return int(summary.get("exit_status", 0))


def read_summary(path: Path) -> Json | None:
    """Return the summary of a finished run; None if it is missing or truncated."""
    try:
        summary = json.loads((path / SUMMARY).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def check_same_config(path: Path, saved: Json, config: RunConfig, ahead: Collection[str] = ()) -> None:
    """Refuse a config that would train something else than `saved` did."""
    before, now = flat(saved), flat(config.model_dump(mode="json"))
    free = tuple(f"{key}." for key in (*KEYS_FREE_ON_RESUME, *ahead))
    for key in dict.fromkeys((*now, *before)):
        old, new = (repr(values[key]) if key in values else "not set" for values in (before, now))
        if old == new or f"{key}.".startswith(free):
            continue
        if key == EPOCHS and key in before:
            if now[key] > before[key]:
                continue
            what = f"{EPOCHS}: {new} is fewer than the {old} that it was trained with, and a run can only grow"
        else:
            what = f"was trained with {key}: {old}, now it is {new}"
        raise UserError(f"{path}: {what}; set it back, or start anew in another run_dir")


def _numbered_folders(name: str) -> dict[int, Path]:
    paths = RUNS.iterdir() if RUNS.exists() else ()
    found = {path: re.fullmatch(re.escape(name) + r"(?:-([1-9]\d*))?", path.name) for path in paths}
    return {int(match[1] or 1): path for path, match in found.items() if match}


def _next_folder(config: RunConfig, number: int) -> RunFolder:
    RUNS.mkdir(exist_ok=True)
    while True:
        path = RUNS / (config.name if number == 1 else f"{config.name}-{number}")
        try:
            path.mkdir()
            return _locked(path, config)
        except (FileExistsError, FolderInUseError):  # a run that starts at the same time took it
            number += 1
