"""The C kernels as a shared library, compiled into the user's cache on first use.

A file there is loaded as code. So folder and file have to belong to this user or root and be closed to others, and no
folder above lets everyone replace them. A hash in the file's name reveals a truncated or damaged one before it is
loaded: loading one would crash the process.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from qat.kernels.cpu.structures import declare

HERE = Path(__file__).parent

SOURCES = tuple(HERE / f"{name}.c" for name in ("quantizers", "statistics", "norms", "pools", "curves", "evaluation"))

HEADERS = (HERE / "grids.h", HERE / "rows.h")

FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")

VARIANTS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-fopenmp",),
    (),
)
"""Flags to try in this order: not every compiler knows every flag."""

SECONDS = 120

log = logging.getLogger("qat.kernels")


_loaded = False


def is_loaded() -> bool:
    """Return True if the library is loaded; code under torch.compile cannot build it."""
    return _loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if it cannot be built; the log gives the reason.

    The compiler is $CC, or the first of cc, gcc and clang. QAT_KERNELS=off forbids the kernels, and QAT_KERNELS_CFLAGS
    adds flags, such as `-fsanitize=address`.
    """
    if os.environ.get("QAT_KERNELS", "").lower() == "off":
        log.info("QAT_KERNELS=off: quantizers run as plain torch operations")
        return None
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        log.warning("no C compiler found (cc, gcc, clang or $CC): quantizers run as plain torch operations, slower")
        return None
    global _loaded
    try:
        found = ctypes.CDLL(str(_built(compiler)))
        declare(found)
        _loaded = True
        return found
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "the C kernels could not be built with %s (%s): quantizers run as plain torch operations, slower",
            compiler,
            (str(error).splitlines() or [type(error).__name__])[0],
        )
        return None


def _built(compiler: str) -> Path:
    more = tuple(os.environ.get("QAT_KERNELS_CFLAGS", "").split())
    key = hashlib.sha256()  # of all that the library depends on
    for source in (*HEADERS, *SOURCES):
        key.update(source.read_bytes() + b"\0")
    version = _ran([*compiler.split(), "--version"]).stdout
    for part in (compiler, version, _processor(), *FLAGS, *more):
        key.update(part.encode() + b"\0")
    name = f"cpu-{key.hexdigest()[:24]}"
    folder = cache_folder()
    path = None if folder is None else stored(folder, name)
    if path is not None:
        return path
    if folder is None or not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="qat-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    said = ""
    # Beside its place, since only a move within one file system is atomic.
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as workplace:
        target = Path(workplace) / "library.so"
        for variant in VARIANTS:
            command = [*compiler.split(), *FLAGS, *variant, *more, *map(str, SOURCES), "-o", str(target), "-lm"]
            ran = _ran(command, TMPDIR=workplace)
            if ran.returncode == 0:
                log.info("the C kernels were built with %s; they are kept in %s", compiler, folder)
                return store(target, folder, name)
            said = ran.stderr
    raise OSError(said or "it said nothing")


def cache_folder() -> Path | None:
    """Return `qat/kernels` in the user's cache, created if missing, or None.

    None if there is no safe place: no home folder, or others could write to it. The log gives the reason.
    """
    try:
        chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification says to ignore relative paths.
        folder = (chosen if chosen.is_absolute() else Path.home() / ".cache") / "qat" / "kernels"
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        opened = next((part for part in (folder, *folder.resolve().parents) if _is_open(part, part != folder)), None)
        if opened is None:
            return folder
        reason = f"others can write to {opened}"
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        reason = str(error)
    log.info("no private folder to keep the C kernels in (%s): they are compiled for this process only", reason)
    return None


def stored(folder: Path, key: str) -> Path | None:
    """Return the intact library that was stored under a key; remove damaged ones."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        whole = stat.S_ISREG(path.lstat().st_mode) and not _is_open(path)
        if whole and path.stem == f"{key}-{_digest(path)}":
            return path
        with contextlib.suppress(OSError):  # another process may have removed it
            path.unlink()
    return None


def store(library: Path, folder: Path, key: str) -> Path:
    """Move a library there atomically: other processes may store or load theirs."""
    library.chmod(0o700)
    path = folder / f"{key}-{_digest(library)}.so"
    os.replace(library, path)
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _is_open(path: Path, above: bool = False) -> bool:
    # Someone who is neither this user nor root owns the path or can write to it. Of a folder `above`: everyone can
    # replace what is in it; in a sticky one (/tmp) users replace their own.
    state = path.stat()
    if above:  # in a sticky folder users replace their own files alone
        return bool(state.st_mode & stat.S_IWOTH) and not state.st_mode & stat.S_ISVTX
    return state.st_uid not in (0, os.getuid()) or bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _ran(command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=SECONDS,
        env={**os.environ, **environment},
    )  # fmt: skip


def _processor() -> str:
    # What -march=native depends on: different machines may share a home folder.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
