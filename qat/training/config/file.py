"""Reads a config file and `key.path=value` overrides into a checked `RunConfig`, and writes one as YAML."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qat.text import did_you_mean
from qat.training.config.by_bits import with_choices_by_bits
from qat.training.config.error_messages import Location, as_yaml, dotted, one_line, schema_at, sentences_of
from qat.training.config.schema import RunConfig
from qat.training.config.yaml_subset import LARGEST, dump_yaml, parse_yaml
from qat.training.errors import UserError

NULLS = "null leaves a choice to the target, the data set or the model; layers.txt shows every layer's grid"
"""The first line of a written config."""

_SUFFIXES = (".yaml", ".yml")


def load_config(path: str, overrides: Sequence[str] = (), config_folder: Path | None = None) -> RunConfig:
    """Read a config file, apply the overrides and check the result.

    Paths in the config stay as written; they are relative to the current folder. `name` defaults to the file's stem.

    Args:
        path: the file, with or without `.yaml`; a bare name is also looked up in `config_folder`.
        overrides: `key.path=value`, with the value in YAML. Later ones win, and a section given as a whole replaces
            the file's. Layer patterns may contain dots: `quantization.overrides.layer1.0.conv1.weight.bits=8`.
        config_folder: the folder of the shipped configs.

    Raises:
        UserError: with one sentence for each problem of the file and the overrides.
    """
    file = _find(path, config_folder)
    source = _relative(file)
    parsed = parse_yaml(_read(file, source))
    problems = [f"{source}: {problem}" for problem in parsed.problems]
    tree: dict[str, Any] = {}
    if isinstance(parsed.value, dict):
        tree = parsed.value
    elif parsed.value is not None:
        problems.append(f"{source}: expected keys and values at the top level, got {as_yaml(parsed.value)}")
    elif not parsed.problems:
        problems.append(f"{source}: is empty; name at least a data set, such as data: {{name: digits}}")
    # Python reads a file name that is not UTF-8 with lone surrogates, which YAML cannot contain.
    tree.setdefault("name", file.stem.encode(errors="backslashreplace").decode())

    applied: list[_Override] = []
    for typed in overrides:
        try:
            applied.append(_apply(tree, typed))
        except UserError as error:
            problems += [f"{one_line(typed)}: {problem}" for problem in error.problems]

    def where(location: Location) -> str:
        for override in reversed(applied):
            if location[: len(override.created)] == override.created:
                words = one_line(override.typed)
                return words if location == override.path else f"{words}: {dotted(location)}"
        return f"{source}: {dotted(location)}" if location else source

    try:
        # JSON mode is strict about types, but accepts a list where the schema has a tuple.
        config = RunConfig.model_validate_json(json.dumps(with_choices_by_bits(tree)), strict=True)
    except ValidationError as error:
        raise UserError(*problems, *sentences_of(error, where)) from None
    if problems:
        raise UserError(*problems)
    return config


def dump_config(config: RunConfig) -> str:
    """Write the config with all defaults filled in, as YAML that `load_config` reads back to an equal config."""
    return f"# {NULLS}\n{dump_yaml(config.model_dump())}"


def _find(path: str, config_folder: Path | None) -> Path:
    given = Path(path)
    folders = [given.parent]
    if config_folder is not None and given.name == path:
        folders.append(config_folder)
    for folder in folders:
        for suffix in ("", *_SUFFIXES):
            file = folder / (given.name + suffix)
            if os.path.exists(file) and not os.path.isdir(file):  # os.path: False, no error, without permission
                return file
    if path and os.path.isdir(given):
        raise UserError(f"config {path!r}: is a folder; name a config file in it")
    places = " and ".join(str(folder.absolute()) for folder in folders)
    existing = {} if config_folder is None else {file.stem: file.name for file in _configs_in(config_folder)}
    existing |= {file.stem: str(file) for file in _configs_in(given.parent)}
    wanted = given.stem if given.suffix in _SUFFIXES else given.name
    listed = f"there are: {', '.join(sorted(existing.values()))}" if existing else "no config lies there"
    hint = did_you_mean(wanted, existing, count=3, shown=existing.__getitem__) or listed
    raise UserError(f"config {path!r}: not found in {places}; {hint}")


def _configs_in(folder: Path) -> list[Path]:
    return [file for suffix in _SUFFIXES for file in folder.glob(f"*{suffix}")]


def _relative(file: Path) -> str:
    """The file's path, relative to the current folder if the file is below it."""
    try:
        return str(file.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def _read(file: Path, source: str) -> str:
    try:
        with open(file, encoding="utf-8-sig") as opened:
            text = opened.read(LARGEST + 1)  # not all of it: the file may be /dev/zero, or a checkpoint
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{source}: is not UTF-8 text; a config is a YAML file saved as UTF-8") from None
    if len(text) > LARGEST:
        raise UserError(f"{source}: is longer than {LARGEST:,} characters; a config is a small YAML file")
    return text


@dataclass(frozen=True)
class _Override:
    """An override that has been applied, as the user typed it."""

    typed: str
    path: Location
    created: Location
    """The shortest part of the path that the override created; everything below it comes from the override."""


def _apply(tree: dict[str, Any], typed: str) -> _Override:
    key, separator, text = typed.partition("=")
    if not separator:
        raise UserError("expected key.path=value, such as qat.lr=0.01")
    parsed = parse_yaml(text)
    if parsed.problems:
        raise UserError(*parsed.problems)
    path = _steps(key.strip())
    node, created = tree, len(path)
    for depth, step in enumerate(path[:-1], start=1):
        schema = schema_at(path[:depth])
        inner = node.get(step)
        if schema is not None and schema.get("type", "object") != "object":
            raise UserError(f"{dotted(path[:depth])!r} has no keys of its own; set it as {dotted(path[:depth])}=...")
        if inner is None:
            inner, created = {}, min(created, depth)
            node[step] = inner
        elif not isinstance(inner, dict):
            raise UserError(f"{dotted(path[:depth])!r} is {as_yaml(inner)}, which has no keys of its own")
        node = inner
    node[path[-1]] = parsed.value
    return _Override(typed, path, path[:created])


def _steps(key: str) -> tuple[str, ...]:
    """Split `qat.lr` into its keys. A layer pattern keeps its dots: (quantization, overrides, layer1.0, skip)."""
    parts = key.split(".")
    if not all(parts):
        raise UserError(f"the key {key!r} is empty or has an empty part; expected key.path=value")
    for start in range(1, len(parts)):
        schema = schema_at(parts[:start]) or {}
        section = schema_at([*parts[:start], ""]) if "properties" not in schema else None
        if section and "properties" in section:  # the user chooses the names; each has a section of its own
            end = next((i for i in range(start + 1, len(parts)) if parts[i] in section["properties"]), len(parts))
            return (*parts[:start], ".".join(parts[start:end]), *parts[end:])
    return tuple(parts)
