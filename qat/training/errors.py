"""Errors that the command shows as plain sentences, with exit status 2."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from qat.text import first_line


class UserError(Exception):
    """Something that the user can fix.

    Its sentences say where, what with the value, and what would be right. Most functions of the trainer and of the
    verbs may raise it; their docstrings do not say so.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@contextmanager
def value_errors_reported(where: str = "") -> Iterator[None]:
    """Turn a ValueError of the library into a UserError that begins with `where`."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{where}{error}") from error


@contextmanager
def problems_of(where: str) -> Iterator[None]:
    """Prefix the sentences of a UserError with `where`, a place in the config."""
    try:
        yield
    except UserError as error:
        raise UserError(*(f"{where}: {problem}" for problem in error.problems)) from error


@contextmanager
def reading(what: str, expected: str) -> Iterator[None]:
    """Make a sentence of a file of `data.root` that cannot be read, or has another content."""
    try:
        yield
    except OSError as error:
        where = f"'{error.filename}' cannot be read ({error.strerror}){looked_in(Path(error.filename))}"
        raise UserError(f"data.root: {where}; expected {expected}") from error
    except (LookupError, TypeError, AttributeError, ValueError, SyntaxError, yaml.YAMLError) as error:
        found = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"data.root: {what} is not as it should be ({found}); expected {expected}") from error


def looked_in(path: Path) -> str:
    """Return the folder of a relative path for a sentence: " (looked in '/home/me')"."""
    return "" if path.is_absolute() else f" (looked in '{os.getcwd()}')"
