"""The C kernels as a shared library: compiled once, on their first use, into the user's cache."""

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from qat.kernels.structures import declare

HERE = Path(__file__).parent

SOURCES = tuple(HERE / f"{name}.c" for name in ("quantizers", "statistics", "norms", "pools", "curves"))

HEADERS = (HERE / "grids.h", HERE / "rows.h")

FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")

VARIANTS = (
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-fopenmp",),
    (),
)
"""Tried in this order: not every compiler knows every flag."""

SECONDS = 120

log = logging.getLogger("qat.kernels")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it cannot be built; the reason goes to the log, once.

    The compiler is $CC, or the first of cc, gcc and clang. QAT_KERNELS=off says that none is to be used.
    """
    if os.environ.get("QAT_KERNELS", "").lower() == "off":
        log.info("QAT_KERNELS=off: quantizers run as plain torch operations")
        return None
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        log.warning("no C compiler found (cc, gcc, clang or $CC): quantizers run as plain torch operations, slower")
        return None
    try:
        found = ctypes.CDLL(str(_built(compiler)))
        declare(found)
        return found
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "the C kernels could not be built with %s (%s): quantizers run as plain torch operations, slower",
            compiler,
            str(error).splitlines()[0],
        )
        return None


def _built(compiler: str) -> Path:
    """Where the library lies, built if it is not there yet."""
    folder = _cache_folder()
    key = hashlib.sha256()
    for source in (*HEADERS, *SOURCES):
        key.update(source.read_bytes() + b"\0")
    for part in (compiler, _version(compiler), _processor(), *FLAGS):
        key.update(part.encode() + b"\0")
    path = folder / f"cpu-{key.hexdigest()[:24]}.so"
    if path.exists():
        return path
    said = ""
    for variant in VARIANTS:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as target:
            unfinished = Path(target.name)
        command = [*compiler.split(), *FLAGS, *variant, *map(str, SOURCES), "-o", str(unfinished), "-lm"]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if outcome.returncode == 0:
            os.replace(unfinished, path)  # in one piece: other processes may be building it too
            return path
        unfinished.unlink()
        said = outcome.stderr
    raise OSError(said or "it said nothing")


def _cache_folder() -> Path:
    """A folder that only this user can write to: what lies in it is loaded as code. At worst one for this run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "qat" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    private = Path(tempfile.mkdtemp(prefix="qat-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


def _version(compiler: str) -> str:
    return subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, timeout=SECONDS).stdout


def _processor() -> str:
    """What -march=native depends on; a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
