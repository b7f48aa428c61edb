"""Users' code: modules under `imports`, and callables `package.module:callable`."""

import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from qat.text import did_you_mean
from qat.training.errors import UserError

OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep  # qat/training, whose frames `place` skips

_named: ContextVar[Collection[str] | None] = ContextVar("named", default=None)  # by the user; None: configs may too


@contextmanager
def only_code(named: Collection[str]) -> Iterator[None]:
    """Import no other code than this, which the user names, whatever a config says."""
    token = _named.set(named)
    try:
        yield
    finally:
        _named.reset(token)


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Let modules in the current folder be imported, as `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def import_extensions(modules: Sequence[str], key: str = "imports[{}]") -> None:
    """Import what a user names under a key: `module` to register rules and targets, or `module:callable`."""
    with current_folder_importable():
        for number, name in enumerate(modules):
            _import_module(name, key.format(number))


@contextmanager
def users_callable(key: str, name: str) -> Iterator[Callable[..., Any]]:
    """Yield the callable named by `package.module:callable`.

    Errors of the context, where it is called, become a sentence about the key.
    """
    with current_folder_importable():
        module_name, _, attribute = name.partition(":")
        if not module_name or not attribute:
            raise UserError(f"{key}: '{name}' is incomplete; write package.module:callable")
        found: Any = _import_module(name, key)
        for part in attribute.split("."):
            if not hasattr(found, part):
                hint = did_you_mean(part, dir(found))
                raise UserError(f"{key}: '{module_name}' has no '{attribute}'{hint and f'; {hint}'}")
            found = getattr(found, part)
        if not callable(found):
            raise UserError(f"{key}: '{name}' is {type(found).__name__}; it must be callable")
        try:
            yield found
        except UserError:
            raise
        except Exception as error:  # user code may raise anything; the place says more than the type
            raise UserError(f"{key}: '{name}' failed ({reason(error)}{place(error)})") from error


def reason(error: Exception) -> str:
    message = textwrap.shorten(str(error), 200, placeholder=" ...")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def place(error: Exception) -> str:
    """Return ", file:line" of the innermost frame outside of qat.training, or ""."""
    if isinstance(error, SyntaxError):
        return f", {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    users = [each for each in frames if not each.filename.startswith((OWN_FOLDER, "<"))]
    return f", {users[-1].filename}:{users[-1].lineno}" if users else ""


def _import_module(code: str, key: str) -> ModuleType:
    name, named = code.partition(":")[0], _named.get()
    if named is not None and code not in named:
        why = "no code is imported because a file names it"
        raise UserError(f"{key}: '{code}' is code of your own, and {why}; add --import {code}")
    try:
        return importlib.import_module(name)
    except Exception as error:  # user code may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):  # not a module that it imports
            where = f"neither in the current folder '{os.getcwd()}' nor on PYTHONPATH nor installed"
            raise UserError(f"{key}: no module '{absent}', {where}") from error
        raise UserError(f"{key}: importing '{name}' failed ({reason(error)}{place(error)})") from error
