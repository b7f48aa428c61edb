"""The C kernels as a shared library, compiled into the user's cache on their first use."""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from qat.kernels.cpu.cache import cache_folder, process_folder, store, stored
from qat.kernels.cpu.structures import declare

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


_loaded = False


def is_loaded() -> bool:
    """Whether the library is loaded. Code under torch.compile may ask this; it can neither build nor load it."""
    return _loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None if it cannot be built; the log gives the reason, once.

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
    """The path of the library, which is built if the cache lacks it."""
    more = tuple(os.environ.get("QAT_KERNELS_CFLAGS", "").split())
    key = hashlib.sha256()
    for source in (*HEADERS, *SOURCES):
        key.update(source.read_bytes() + b"\0")
    _, version, _ = _ran([*compiler.split(), "--version"])
    for part in (compiler, version, _processor(), *FLAGS, *more):
        key.update(part.encode() + b"\0")
    name = f"cpu-{key.hexdigest()[:24]}"
    folder = cache_folder()
    path = None if folder is None else stored(folder, name)
    if path is not None:
        return path
    if folder is None or not os.access(folder, os.W_OK):
        folder = process_folder()
    said = ""
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as workplace:
        target = Path(workplace) / "library.so"
        for variant in VARIANTS:
            command = [*compiler.split(), *FLAGS, *variant, *more, *map(str, SOURCES), "-o", str(target), "-lm"]
            status, _, said = _ran(command, TMPDIR=workplace)
            if status == 0:
                log.info("the C kernels were built with %s; they are kept in %s", compiler, folder)
                return store(target, folder, name)
    raise OSError(said or "it said nothing")


def _ran(command: list[str], **environment: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a compiler; if the wait is interrupted, all its processes are killed."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True, env={**os.environ, **environment},
    )  # fmt: skip
    with process:
        try:
            said, errors = process.communicate(timeout=SECONDS)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said, errors


def _processor() -> str:
    """What -march=native depends on: different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
