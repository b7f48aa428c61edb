"""A lock so that only one run at a time writes into a folder; it ends with the process, however the process ends."""

import errno
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
    """The right to write into a folder, held from construction to `release`.

    It is a POSIX lock (`lockf`), which loader processes do not inherit: they survive a killed parent for seconds. They
    would inherit that of the library filelock (`flock`).

    Args:
        folder: an existing, writable folder.

    Raises:
        FolderInUseError: if another run holds the lock.
        UserError: if the lock file cannot be written, or the platform has no such locks.
    """

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise UserError(f"{folder}: a run needs POSIX's file locks, which are missing; use Linux, macOS or WSL")
        self.folder = folder.absolute()  # whatever a chdir changes later
        self._path, self._key = self.folder / LOCK, os.path.realpath(folder)
        with _guard:
            try:
                descriptor = None if self._key in _held else _locked(self._path)
            except OSError as error:
                raise UserError(f"{self._path}: cannot lock the run folder ({error.strerror})") from error
            if descriptor is None:
                raise FolderInUseError(
                    f"{self.folder}: another run writes there; wait for its end, or choose another run_dir"
                )
            _held[self._key] = self
            self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock; further calls do nothing."""
        with _guard:
            if _held.get(self._key) is self:
                del _held[self._key]
                with suppress(OSError):  # an error here would hide the run's own, and a remaining file locks nothing
                    self._path.unlink()
                os.close(self._descriptor)


def _locked(path: Path) -> int | None:
    """The descriptor of a lock file that is this process's now; None if another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                return None
            logger.warning("%s: no locks here (%s); nothing keeps a second run out", path, error.strerror)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its last holder removed the file after it was opened
