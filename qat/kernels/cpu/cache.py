"""Where compiled code is kept: in a folder that nobody else can write to, under a name with a hash of its content.

A file there is loaded as code. So every folder on the path has to belong to this user or root and be closed to others,
and the hash reveals a truncated or damaged file before it is loaded: loading one would crash the process.
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
    """`qat/kernels` in the user's cache ($XDG_CACHE_HOME or ~/.cache), created if missing.

    None if there is no safe place: no home folder, or others could write to it. The log gives the reason.
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
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home, circular links
        reason = str(error)
    log.info("no private folder to keep the C kernels in (%s): they are compiled for this process only", reason)
    return None


def process_folder() -> Path:
    """A private folder that is deleted when this process ends."""
    private = Path(tempfile.mkdtemp(prefix="qat-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


def stored(folder: Path, key: str) -> Path | None:
    """The library that was stored under a key, if it is intact; damaged ones are removed."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        state = path.lstat()
        if stat.S_ISREG(state.st_mode) and not _is_open(state) and path.stem == f"{key}-{_digest(path)}":
            return path
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def store(library: Path, folder: Path, key: str) -> Path:
    """Move a library there atomically: other processes may be storing theirs, or looking for it."""
    library.chmod(0o700)
    path = folder / f"{key}-{_digest(library)}.so"
    os.replace(library, path)
    return path


def _base() -> Path:
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if chosen.is_absolute():  # the XDG specification says to ignore relative paths
        return chosen
    home = Path.home()
    if not home.is_absolute():
        raise OSError(f"the home folder is {str(home)!r}")
    return home / ".cache"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _lets_others_in(part: Path, folder: Path) -> bool:
    """Whether someone else could replace a part of the path; in a sticky folder (/tmp) users replace only their own."""
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
    """Whether the owner is the group's only member: many systems give each user such a group."""
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(state.st_uid).pw_name, grp.getgrgid(state.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}
