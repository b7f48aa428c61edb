"""A file takes its place in one piece: it is written under another name, and renamed once it is on the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def put_in_place(temporary: Path, path: Path) -> Iterator[None]:
    """Within the context `temporary` is written; at its end it becomes `path`, or after an error it is removed.

    Args:
        temporary: a name beside `path`, which no other writer uses.
        path: the file; an existing one is whole at every moment, the old or the new.

    Raises:
        OSError: if the file cannot be written.
    """
    try:
        yield
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
