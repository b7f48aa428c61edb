"""A lock so that only one run at a time writes into a folder; it ends with the process, however the process ends."""

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

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
            try:
                descriptor = None if self._key in _held else _locked(self.path)
            except OSError as error:
                raise UserError(f"{self.path}: cannot lock the run folder ({error.strerror})") from error
            if descriptor is None:
                raise FolderInUseError(
                    f"{self.folder}: another run writes there; wait for its end, or choose another run_dir"
                )
            self.descriptor = descriptor
            _held[self._key] = self

    def release(self) -> None:
        """Release the lock; further calls do nothing."""
        with _guard:
            if _held.get(self._key) is self:
                del _held[self._key]
                with suppress(OSError):  # an error here would hide the run's own, and a remaining file locks nothing
                    if _is_file(self.descriptor, self.path):
                        self.path.unlink()
                os.close(self.descriptor)


def check_folder(folder: Path) -> None:
    """Refuse to write into a folder that is no longer the one that this process locked.

    Folders are compared by name, because a link may lead elsewhere by now.
    """
    for lock in list(_held.values()):
        if lock.folder in (folder.absolute(), *folder.absolute().parents) and not _is_file(lock.descriptor, lock.path):
            raise UserError(
                f"{lock.folder}: the run folder or its {LOCK} was moved, deleted or replaced while the run wrote there;"
                " the run ends, so that it does not write into another's"
            )


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _locked(path: Path) -> int | None:
    """The descriptor of a lock file that is this process's now; None if another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except OSError as error:
            logger.warning("%s: no locks here (%s); nothing keeps a second run out", path, error.strerror)
        if _is_file(descriptor, path):
            return descriptor
        os.close(descriptor)  # its last holder removed the file after it was opened
