"""Where compiled code is kept: in a folder that nobody else can write to, under a name that tells its content.

What lies there is loaded as code. So every folder on the way to it has to be this user's or root's and closed to
others, and a file that was cut off or damaged is told by its name before it is loaded: the loader would not survive it.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

ROOT = 0

log = logging.getLogger("qat.kernels")


def cache_folder() -> Path | None:
    """`qat/kernels` in the user's cache ($XDG_CACHE_HOME or ~/.cache), made if it is not there.

    None where there is no such place: no home folder, or others could put something into it. The log says which.
    """
    try:
        folder = (_base() / "qat" / "kernels").resolve()
        for part in reversed((folder, *folder.parents)):
            if not part.exists():
                part.mkdir(mode=0o700, exist_ok=True)
        opened = next((part for part in (folder, *folder.parents) if _lets_others_in(part, folder)), None)
        if opened is None:
            return folder
        reason = f"others can write to {opened}"
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home, links that go round
        reason = str(error)
    log.info("no private folder to keep the C kernels in (%s): they are compiled for this process only", reason)
    return None


def process_folder() -> Path:
    """A private folder that ends with this process."""
    private = Path(tempfile.mkdtemp(prefix="qat-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


def stored(folder: Path, key: str) -> Path | None:
    """The library that was stored under a key, if it is whole; those that are not are removed."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and not _is_open(state) and path.stem == f"{key}-{_digest(path)}":
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def store(library: Path, folder: Path, key: str) -> Path:
    """Move a library there, in one piece: other processes may be storing theirs, or looking for it."""
    library.chmod(0o700)
    path = folder / f"{key}-{_digest(library)}.so"
    os.replace(library, path)
    return path


def _base() -> Path:
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():  # others are to be ignored, says XDG
        return chosen
    home = Path.home()
    if not home.is_absolute():
        raise OSError(f"the home folder is {str(home)!r}")
    return home / ".cache"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _lets_others_in(part: Path, folder: Path) -> bool:
    """Whether someone else could replace a part of the path; in a sticky folder (/tmp) only one's own can be."""
    state = part.lstat()
    return _is_open(state) and not (part != folder and _is_ours(state) and state.st_mode & stat.S_ISVTX)


def _is_open(state: os.stat_result) -> bool:
    """Whether someone who is neither this user nor root can write."""
    if not _is_ours(state) or state.st_mode & stat.S_IWOTH:
        return True
    return bool(state.st_mode & stat.S_IWGRP) and not _is_owners_group(state)


def _is_ours(state: os.stat_result) -> bool:
    return state.st_uid in (ROOT, os.getuid())


def _is_owners_group(state: os.stat_result) -> bool:
    """Whether the group is the owner's alone, as many systems give one to each user."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(state.st_uid).pw_name, grp.getgrgid(state.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}
