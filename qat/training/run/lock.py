"""A lock so that only one run at a time writes into a folder; it ends with the process, however the process ends.

It is a POSIX lock. Windows has none, so runs do not work there.
"""

import errno
import logging
import os
import socket
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
"""The locked file in a run folder. It names the writing process; a run that ends normally removes it."""

_held: "dict[str, RunLock]" = {}
"""The locks of this process, by real path, because the system's locks only separate processes, not threads."""
_guard = threading.Lock()


class FolderInUseError(UserError):
    """Another run writes into the folder."""


class RunLock:
    """The right to write into a folder, held from construction to `release`.

    The lock is a POSIX lock (`fcntl.lockf`): the system releases it with the process, loader processes do not inherit
    it (they survive a killed parent for seconds), and NFS shares it between hosts. On a file system without such
    locks, there is a warning.

    Args:
        folder: an existing, writable folder.

    Raises:
        FolderInUseError: if another run holds the lock; the message names its process and host.
        UserError: if the lock file cannot be written, or the platform has no such locks.
    """

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise UserError(f"{folder}: a run needs POSIX's file locks, which are missing; use Linux, macOS or WSL")
        self.folder = folder.absolute()  # the name at locking time, whatever a chdir or a link changes later
        self._path = self.folder / LOCK
        self._key = os.path.realpath(folder)
        with _guard:
            if self._key in _held:
                raise _in_use(self.folder, f"{os.getpid()} {socket.gethostname()}")
            try:
                self._descriptor = self._acquire()
            except OSError as error:
                raise UserError(f"{self._path}: cannot lock the run folder ({error.strerror})") from error
            _held[self._key] = self

    def check(self) -> None:
        """Check that the folder is still the one that was locked.

        Raises:
            UserError: if the folder was moved, deleted or replaced, so that another run may write there.
        """
        if not self._is_ours(self._descriptor):
            raise UserError(
                f"{self.folder}: the run folder or its {LOCK} was moved, deleted or replaced while the run wrote there;"
                " the run ends, so that it does not write into another's"
            )

    def release(self) -> None:
        """Release the lock; further calls do nothing."""
        with _guard:
            if _held.get(self._key) is not self:
                return
            del _held[self._key]
            try:
                with suppress(OSError):  # an error here would hide the run's own, and a remaining file locks nothing
                    if self._is_ours(self._descriptor):
                        self._path.unlink()
            finally:
                os.close(self._descriptor)

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                before = os.read(descriptor, 1000).decode(errors="replace").strip()
                self._lock(descriptor, before)
                if self._is_ours(descriptor):  # otherwise the last holder removed the file after it was opened
                    self._sign(descriptor, before)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int, holder: str) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _in_use(self.folder, holder) from error
            logger.warning(
                "%s: its file system has no locks (%s); nothing keeps a second run out of it",
                self.folder,
                error.strerror,
            )

    def _sign(self, descriptor: int, before: str) -> None:
        host = socket.gethostname()
        if before and before.split()[-1] != host:
            logger.warning(
                "%s: the last run here, %s, did not end by itself; make sure that it does not run any more, as some"
                " file systems lock for one host only",
                self.folder,
                _named(before),
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {host}\n".encode(), 0)

    def _is_ours(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except OSError:
            return False


def check_folder(folder: Path) -> None:
    """Call `RunLock.check` for the lock that this process holds on a folder or one above it; without one, do nothing.

    Folders are compared by name, because a link may lead elsewhere by now.

    Raises:
        UserError: if the folder is no longer the one that was locked.
    """
    for lock in list(_held.values()):
        if lock.folder in (folder.absolute(), *folder.absolute().parents):
            lock.check()


def _in_use(folder: Path, holder: str) -> FolderInUseError:
    return FolderInUseError(
        f"{folder}: another run writes there ({_named(holder)}); wait for its end, or choose another run_dir"
    )


def _named(holder: str) -> str:
    process, _, host = holder.partition(" ")
    return f"process {process} on {host}" if host else "it has not said which"
