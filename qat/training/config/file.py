"""Reads a config file and `key.path=value` overrides into a checked `RunConfig`, and writes one as YAML."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qat.text import did_you_mean
from qat.training.config.by_bits import with_choices_by_bits
from qat.training.config.error_messages import Location, as_text, dotted, sentences_of
from qat.training.config.schema import OverrideConfig, RunConfig
from qat.training.config.yaml_subset import LARGEST, dump_yaml, parse_yaml
from qat.training.errors import UserError

NULLS = "null leaves a choice to the target, the data set or the model; layers.txt shows every layer's grid"
"""The first line of a written config."""

_SUFFIXES = (".yaml", ".yml")


def load_config(path: str, overrides: Sequence[str] = (), config_folder: Path | None = None) -> RunConfig:
    """Read a config file, apply the overrides and check the result; paths stay relative to the current folder.

    A bare name is also looked up in `config_folder`. An override is `key.path=value`, with the value in YAML. Later
    ones win, and a section given as a whole replaces the file's.
    """
    file = _find(path, config_folder)
    source = _relative(file)
    parsed = parse_yaml(_read(file, source))
    problems = [f"{source}: {problem}" for problem in parsed.problems]
    tree: dict[str, Any] = {}
    if isinstance(parsed.value, dict):
        tree = parsed.value
    elif parsed.value is not None:
        problems.append(f"{source}: expected keys and values at the top level, got {as_text(parsed.value)}")
    elif not parsed.problems:
        problems.append(f"{source}: is empty; name at least a data set, such as data: {{name: digits}}")
    tree.setdefault("name", file.stem)

    applied: dict[str, Location] = {}
    for typed in overrides:
        try:
            applied[typed] = _apply(tree, typed)
        except UserError as error:
            problems += [f"{typed}: {problem}" for problem in error.problems]

    def where(location: Location) -> str:
        for typed, path in reversed(applied.items()):
            if location and location == path[: len(location)]:
                return typed if location == path else f"{typed}: {dotted(location)}"
            if location[: len(path)] == path:
                return f"{typed}: {dotted(location)}"
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


def _apply(tree: dict[str, Any], typed: str) -> Location:
    """Apply an override to the tree; return the path of its key."""
    key, separator, text = typed.partition("=")
    path = _steps(key.strip())
    if not separator or not all(path):
        raise UserError("expected key.path=value, such as qat.lr=0.01")
    parsed = parse_yaml(text)
    if parsed.problems:
        raise UserError(*parsed.problems)
    node = tree
    for depth, step in enumerate(path[:-1], start=1):
        if node.get(step) is None:
            node[step] = {}
        node = node[step]
        if not isinstance(node, dict):
            raise UserError(f"{dotted(path[:depth])!r} is {as_text(node)}, which has no keys of its own")
    node[path[-1]] = parsed.value
    return path


def _steps(key: str) -> tuple[str, ...]:
    """Split `qat.lr` into its keys. A layer pattern keeps its dots: (quantization, overrides, layer1.0, skip)."""
    parts = key.split(".")
    if parts[:2] == ["quantization", "overrides"]:
        end = next((i for i in range(3, len(parts)) if parts[i] in OverrideConfig.model_fields), len(parts))
        parts[2:end] = [".".join(parts[2:end])] if len(parts) > 2 else []
    return tuple(parts)
