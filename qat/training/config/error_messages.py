"""pydantic's errors as one line each: where it is, what is wrong with which value, and what was probably meant."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from qat.text import did_you_mean
from qat.training.config.schema import RunConfig
from qat.training.config.section import Section

Location = tuple[str | int, ...]
"""The path to a value: keys of sections and indices of lists, from the top."""


def sentences_of(error: ValidationError, where: Callable[[Location], str]) -> list[str]:
    """Return one line for each problem of a config; it begins with `where(location)`: file or override, and key."""
    lines = []
    for problem in error.errors(include_url=False):
        location, message, value = problem["loc"], problem["msg"], problem["input"]
        if problem["type"] == "value_error":
            location, message = _of_validator(location, str(problem["ctx"]["error"]))
        elif problem["type"] == "extra_forbidden":
            message = f"unknown key; {_key_hint(location)}"
        else:
            choices = re.findall("'([^']+)'", str(problem.get("ctx", {}).get("expected", "")))
            hint = did_you_mean(str(value), choices)
            message = f"{message[0].lower()}{message[1:]}, got {as_text(value)}{hint and f'; {hint}'}"
        lines.append(f"{where(location)}: {message}")
    return lines


def keys_at(location: Sequence[str | int]) -> list[str]:
    """The keys of the section at a location of the config; none where the user chooses them."""
    section: type[Section] | None = RunConfig
    for step in location:
        if section is not None and step in section.model_fields:  # else an element, or a name that the user chooses
            section = _section_in(section.model_fields[str(step)].annotation)
    return list(section.model_fields) if section is not None else []


def dotted(location: Sequence[str | int]) -> str:
    """A location as the user writes it: `qat.lr`, `data.mean[1]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")


def as_text(value: Any) -> str:
    """A value as YAML on one line, of at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds, perhaps in a list or by names, or null."""
    inner = get_args(annotation)
    if inner:
        return next(filter(None, map(_section_in, inner)), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _key_hint(location: Location) -> str:
    keys, key = keys_at(location[:-1]), str(location[-1])
    # For `epochs=3` at the top level, the key is right and its section is missing.
    inside = [f"{name}.{key}" for name in keys if len(location) == 1 and key in keys_at([name])]
    if inside:
        return f"did you mean {' or '.join(map(repr, inside))}?"
    return did_you_mean(key, keys) or f"valid keys: {', '.join(keys)}"


def _of_validator(location: Location, message: str) -> tuple[Location, str]:
    """Move the key that a validator's message begins with (`data.resize_size: 30 is ...`) into the location."""
    key, separator, rest = message.partition(": ")
    named = (*location, *key.split("."))
    return (named, rest) if separator and named[-1] in keys_at(named[:-1]) else (location, message)
