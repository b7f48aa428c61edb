"""The files of a run, each written atomically, and the lock of its folder, which ends with the process."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from qat.atomic_write import atomic_write
from qat.collectives import rank
from qat.training.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("qat")

LOCK = ".lock"
"""The locked file in a run folder; a run that ends normally removes it."""

_held: "dict[str, RunLock]" = {}
"""The locks of this process, by real path, because the system's locks only separate processes, not threads."""
_guard = threading.Lock()


class FolderInUseError(UserError):
    """Another run writes into the folder."""


class RunLock:
    """The right to write into a folder, held from construction to `release`; FolderInUseError if another has it.

    It is a POSIX lock (`lockf`), which loader processes do not inherit: they survive a killed parent for seconds. They
    would inherit that of the library filelock (`flock`).
    """

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise UserError(f"{folder}: a run needs POSIX's file locks, which are missing; use Linux, macOS or WSL")
        self.folder = folder.absolute()  # whatever a chdir or a link changes later
        self.path, self._key = self.folder / LOCK, os.path.realpath(folder)
        with _guard:
            if self._key in _held or not self._is_locked():
                raise FolderInUseError(
                    f"{self.folder}: another run writes there; wait for its end, or choose another run_dir"
                )
            _held[self._key] = self

    def _is_locked(self) -> bool:
        """Lock the file; False if another process has it."""
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(self.descriptor)
            return False
        except OSError as error:
            logger.warning("%s: no locks here (%s); nothing keeps a second run out", self.path, error.strerror)
        if self.is_there():
            return True
        os.close(self.descriptor)  # its last holder removed the file after it was opened
        return self._is_locked()

    def is_there(self) -> bool:
        """Whether the locked file is still the one in the folder."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock; further calls do nothing."""
        with _guard:
            if _held.get(self._key) is self:
                del _held[self._key]
                with suppress(OSError):  # an error here would hide the run's own, and a remaining file locks nothing
                    if self.is_there():
                        self.path.unlink()
                os.close(self.descriptor)


def check_folder(folder: Path) -> None:
    """Refuse to write into a folder that is no longer the one that this process locked.

    Folders are compared by name, because a link may lead elsewhere by now.
    """
    for lock in list(_held.values()):
        if lock.folder in (folder.absolute(), *folder.absolute().parents) and not lock.is_there():
            raise UserError(
                f"{lock.folder}: the run folder or its {LOCK} was moved, deleted or replaced while the run wrote there;"
                " the run ends, so that it does not write into another's"
            )


def write_text(path: Path, text: str) -> None:
    """On rank 0, write a text file as UTF-8, atomically: whenever the process ends, it has the old text or the new."""
    if rank():
        return
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file of the run atomically; see `atomic_write`."""
    check_folder(path.parent)
    try:
        # One name for all runs: what a killed run leaves is replaced by the next.
        with atomic_write(path, path.with_name(f".{path.name}.tmp")) as temporary:
            yield temporary
            check_folder(path.parent)  # again, because writing may take minutes, as for an export
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _system_error(error)
        if reason is None:
            raise
        raise UserError(f"{path}: cannot write it ({reason})") from error


def _system_error(error: BaseException) -> str | None:
    """The operating system's message, if it is the cause; torch and safetensors wrap it in their own errors."""
    if isinstance(error, SafetensorError):
        return str(error)
    while not isinstance(error, OSError):
        if error.__context__ is None:
            return None
        error = error.__context__
    return error.strerror or str(error)
