"""The files of a run: each is written in one piece, into the folder that the run has locked."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from qat.atomic_write import atomic_write
from qat.training.errors import UserError
from qat.training.run.lock import check_folder


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8, in one piece: wherever the process ends, `path` holds the old text or the new.

    Args:
        path: the file; it is replaced if it exists.
        text: what it will hold.

    Raises:
        UserError: if the file cannot be written.
    """
    with replacing(path) as temporary:
        # File names of other encodings than UTF-8 reach Python as half characters; they are spelled out.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name beside `path`, then put it in its place once it is on the disk.

    Raises:
        UserError: if the file cannot be written, or its folder is no longer the one that the run has locked.
    """
    check_folder(path.parent)
    try:
        with atomic_write(path, temporary_of(path)) as temporary:
            yield temporary
            check_folder(path.parent)  # writing may take minutes: an export does
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _disk_trouble(error)
        if reason is None:
            raise
        raise UserError(f"{path}: cannot write it ({reason})") from error


def temporary_of(path: Path) -> Path:
    """The name under which a file is written before it takes its place."""
    return path.with_name(f".{path.name}.tmp")


def _disk_trouble(error: BaseException) -> str | None:
    """What the operating system said, if that is at the root: torch and safetensors wrap it in their own errors."""
    if isinstance(error, SafetensorError):
        return str(error)
    while not isinstance(error, OSError):
        if error.__context__ is None:
            return None
        error = error.__context__
    return error.strerror or str(error)
