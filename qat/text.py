"""Text for a reader: tables, errors in a line, similar names, wrong types."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Return the lines of a plain-text table, with columns two spaces apart.

    The rows are of one length, the head first. With `numbers` all columns but the first are aligned to the right, and
    the head is underlined.

    >>> print(*table([["name", "bits"], ["conv1", "8"]]), sep="\\n")
    name   bits
    conv1  8
    >>> print(*table([["model", "top1"], ["float", "98.10"]], numbers=True), sep="\\n")
    model   top1
    -----  -----
    float  98.10
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    ruler = [["-" * width for width in widths]] if numbers else []
    return [
        "  ".join(
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (rows[0], *ruler, *rows[1:])
    ]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: '1 slot', '2 slots'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are.

    >>> some(["a", "b"]), some(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def did_you_mean(word: str, known: Iterable[str], count: int = 1, shown: Callable[[str], str] = str) -> str:
    """Return a question with the most similar known names; "" if none is similar.

    Case does not matter.

    >>> did_you_mean("LSG", ["lsq", "pact"])
    "did you mean 'lsq'?"
    >>> did_you_mean("conv", ["conv1", "conv2", "fc"], count=3)
    "did you mean 'conv2' or 'conv1'?"
    >>> did_you_mean("ema", ["lsq", "pact"])
    ''
    """
    originals = {name.lower(): name for name in known}  # compared without case, shown as they are
    found = [repr(shown(originals[match])) for match in get_close_matches(word.lower(), originals, count)]
    return f"did you mean {' or '.join(found)}?" if found else ""


def unknown_name(given: Iterable[object], known: Iterable[str], kind: str = "key") -> str:
    """Return the end of a sentence about the first unknown name; "" if all are known.

    It offers the most similar known name, or else all of them.

    >>> unknown_name({"bit": 4}, ["bits", "signed"])
    "unknown key 'bit'; did you mean 'bits'?"
    >>> unknown_name(["bits", "scale"], ["bits", "signed"], "argument")
    "unknown argument 'scale'; valid: bits, signed"
    """
    known = list(known)
    wrong = next((name for name in given if name not in known), None)
    if wrong is None:
        return ""
    hint = did_you_mean(str(wrong), known) or f"valid: {', '.join(known)}"
    return f"unknown {kind} {wrong!r}; {hint}"


_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")  # of a terminal; surrogates are no UTF-8


def printable(text: str) -> str:
    r"""Return text from outside with what steers a terminal, and what is no UTF-8, escaped.

    >>> printable("caf\xe9"), printable("caf\udce9"), printable("\x1b[31mred\x00")
    ('café', 'caf\\udce9', '\\x1b[31mred\\x00')
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def unprintable(names: Iterable[str]) -> str:
    """Return the end of a sentence about the first name that is not `printable`, or ""."""
    what = "has control characters, or is not UTF-8; write it as plain text"
    return next((f"{name!r} {what}" for name in names if printable(name) != name), "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none.

    >>> first_line(ValueError("no such grid\\nand more")), first_line(ValueError())
    ('no such grid', 'ValueError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "None"}
WORDS[Mapping] = "a mapping"
UNIONS = (Union, UnionType)


def check_types(kind: Any, given: Mapping[str, object], where: str = "") -> None:
    """Refuse values that do not fit the annotations of a class or a function.

    A bool is no number. The ValueError says what would be right; it begins with `where`, or else with the name of the
    class or function.
    """
    for name, hint in _hints_of(kind).items():
        if name in given and not _fits(given[name], hint):
            where = where or kind.__qualname__.removesuffix(".__init__")
            raise ValueError(f"{where}: {name} must be {_words(hint)}, got {given[name]!r}")


_hints_of = cache(get_type_hints)


def _fits(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint) or hint, [each for each in get_args(hint) if each is not ...]
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if origin in UNIONS:
        return any(_fits(value, each) for each in inner)
    if isinstance(value, bool) or origin is Any:  # Python's bool is an int
        return origin in (bool, Any)
    if origin not in (tuple, frozenset, Mapping) or not isinstance(value, origin):
        return isinstance(value, Real if origin is float else origin)
    values, kinds = (value.values(), inner[1:]) if isinstance(value, Mapping) else (value, inner)
    return all(any(_fits(each, kind) for kind in kinds) for each in values)


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Literal, *UNIONS):
        return f"one of {', '.join(inner)}" if origin is Literal else " or ".join(map(_words, inner))
    return WORDS.get(origin, f"a {origin.__name__}") + (
        f" of {_words(inner[0])}" if origin in (tuple, frozenset) else ""
    )
