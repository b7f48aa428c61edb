"""Atomic writes: a file appears under its name only once it is complete and on the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the context it is renamed to `path`, or removed after an error.

    Readers see either the old content or the new, never a part. `temporary` is a name in the same folder that no other
    writer uses; by default one with the process id, because every process of a distributed run may export.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # the umask's choice; safetensors writes files for their owner alone
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
