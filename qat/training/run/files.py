"""The files of a run, each written atomically into the folder that the run has locked."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from qat.atomic_write import atomic_write
from qat.training.errors import UserError
from qat.training.run.lock import check_folder


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8, atomically: whenever the process ends, `path` has the old text or the new one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file of the run atomically; see `atomic_write`."""
    check_folder(path.parent)
    try:
        # One name for all runs: what a killed run leaves is replaced by the next.
        with atomic_write(path, path.with_name(f".{path.name}.tmp")) as temporary:
            yield temporary
            check_folder(path.parent)  # again, because writing may take minutes, as for an export
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _system_error(error)
        if reason is None:
            raise
        raise UserError(f"{path}: cannot write it ({reason})") from error


def _system_error(error: BaseException) -> str | None:
    """The operating system's message, if it is the cause; torch and safetensors wrap it in their own errors."""
    if isinstance(error, SafetensorError):
        return str(error)
    while not isinstance(error, OSError):
        if error.__context__ is None:
            return None
        error = error.__context__
    return error.strerror or str(error)
