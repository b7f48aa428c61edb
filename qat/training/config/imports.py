"""Modules of the user's own: models (`model.name: package.module:callable`) and rules (`imports: [my_rules]`)."""

import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from qat.training.errors import UserError


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Let modules in the folder where the user stands be imported, as `python -m` does."""
    folder = os.getcwd()
    added = folder not in sys.path
    if added:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


def import_extensions(modules: Sequence[str]) -> None:
    """Import the modules that a config lists; they register rules and targets of the user's own.

    Raises:
        UserError: if one is not there, or fails.
    """
    with current_folder_importable():
        for number, name in enumerate(modules):
            import_user_module(name, f"imports[{number}]", name)


def import_user_module(name: str, key: str, value: str) -> ModuleType:
    """Import one module.

    Args:
        name: `package.module`.
        key, value: of the config, for the errors.

    Raises:
        UserError: if it is not there, or fails.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's module runs here: anything may come
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            asked = "" if value == absent else f" for '{value}'"
            raise UserError(
                f"{key}: no module '{absent}'{asked}, neither in the current folder '{os.getcwd()}' nor installed"
            ) from error
        raise UserError(f"{key}: importing '{name}' failed ({reason(error)}{place(error)})") from error


def reason(error: Exception) -> str:
    """Put an exception into part of one line."""
    said = textwrap.shorten(str(error), 200, placeholder=" ...")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def place(error: Exception) -> str:
    """Say in which file and line the exception was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f", {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(__file__)
    own = [frame for frame in frames if os.path.dirname(frame.filename) != ours and "importlib" not in frame.filename]
    return f", {own[-1].filename}:{own[-1].lineno}" if own else ""
