"""Atomic writes: a file gets its name once it is complete and on the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` at the end of the context.

    After an error it is removed. Readers see either the old content or the new, never a part. `temporary` is a name in
    the same folder that no other writer uses; the default has the process id.
    """
    # With the process id, since every process of a distributed run may export.
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # as the umask has it: safetensors writes files for their owner alone
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # before the new name: a crash must not leave an empty file under it
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
