"""Turns pydantic's errors into plain sentences, with the help of the JSON schema of `RunConfig`."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from qat.text import did_you_mean
from qat.training.config.schema import RunConfig
from qat.training.config.yaml_subset import parse_yaml

Location = tuple[str | int, ...]
"""The path to a value: keys of sections and indices of lists, from the top."""

_KINDS = ("bool", "int", "float", "string", "dict", "model", "tuple", "list")
_WRONG_TYPES = tuple(f"{kind}_type" for kind in _KINDS)
_WRONG_LENGTHS = ("missing", "too_long")  # of a list
_WRONG_VALUES = ("literal_error", "greater_than", "greater_than_equal", "less_than", "less_than_equal")
_SENTENCES = {
    "extra_forbidden": "unknown key; {hint}",
    "value_error": "{message}",
    "json_invalid": "nested too deeply to be a config",  # `parse_yaml` has refused all other invalid JSON before
    "finite_number": "expected {expected}, got {got}, which is not finite",
    **dict.fromkeys(_WRONG_TYPES + _WRONG_LENGTHS + _WRONG_VALUES, "expected {expected}, got {got}{hint}"),
}
_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
_NAMES = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_TYPES = {"integer": (int,), "number": (int, float), "boolean": (bool,)}


def sentences_of(error: ValidationError, where: Callable[[Location], str]) -> list[str]:
    """Return one line for each problem of a config; it begins with `where(location)`: file or override, and key."""
    lines = []
    for problem in error.errors(include_url=False):
        location: Location = problem["loc"]
        message = problem["msg"]
        if problem["type"] == "missing" and location and isinstance(location[-1], int):
            location = location[:-1]  # pydantic reports each missing element of a list that is too short
        if problem["type"] == "value_error":
            location, message = _of_validator(location, str(problem["ctx"]["error"]))
        schema = schema_at(location)
        sentence = _SENTENCES.get(problem["type"], "{message}, got {got}").format(
            message=re.sub(r"^[A-Z]\w* should", "should", re.sub(r"^Input should be", "expected", message)),
            expected=_expectation(schema or {}),
            got=as_yaml(problem["input"]),
            hint=_key_hint(location) if schema is None else _value_hint(schema, problem["input"]),
        )
        lines.append(f"{where(location)}: {sentence}")
    return list(dict.fromkeys(lines))


def schema_at(location: Sequence[str | int]) -> Mapping[str, Any] | None:
    """The JSON schema of the value at a location of the config; None if there is no such key."""
    schema: Mapping[str, Any] = _without_null(_schema())
    for step in location:
        inner: Any = None
        if isinstance(step, int):
            inner = dict(enumerate(schema.get("prefixItems", ()))).get(step) or schema.get("items")
        else:
            inner = schema.get("properties", {}).get(step) or schema.get("additionalProperties")
        if not inner:
            return None
        schema = _without_null({} if inner is True else inner)
    return schema


def dotted(location: Sequence[str | int]) -> str:
    """A location as the user writes it: `qat.lr`, `data.mean[1]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{one_line(step)}" for step in location).lstrip(".")


def as_yaml(value: Any) -> str:
    """A value in YAML, on one line of at most 80 characters."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{one_line(key)}: {as_yaml(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list):
        text = "[" + ", ".join(as_yaml(inner) for inner in value) + "]"
    else:
        text = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(value, json.dumps(value)).replace("NaN", ".nan")
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(text: str) -> str:
    """The text itself; quoted if it has line breaks or control characters, so that the sentence stays one line."""
    return text if text.isprintable() else repr(text)


@functools.cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _without_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a reference or an optional value; the schema of an optional value gets the mark `or_null`."""
    if "$ref" in schema:
        return _schema()["$defs"][schema["$ref"].rpartition("/")[2]]  # type: ignore[no-any-return]
    for choice in schema.get("anyOf", ()):
        if choice.get("type") != "null":
            return {**_without_null(choice), "or_null": True}
    if "allOf" in schema:  # pydantic before 2.10 writes a reference with a default this way
        return _without_null(schema["allOf"][0])
    return schema


def _expectation(schema: Mapping[str, Any]) -> str:
    """Describe the values that a schema accepts: `a whole number >= 1 or null`, `'sgd' or 'adamw'`."""
    kind = schema.get("type", "")
    words = [repr(choice) for choice in _choices(schema)]
    if not words and kind == "object":
        keys = list(schema.get("properties", ("key: value",)))
        words = [f"a section ({', '.join(keys[:4])}{', ...' * (len(keys) > 4)})"]
    elif not words and kind == "array":
        fixed = schema.get("prefixItems")
        words = [f"a list of {len(fixed)} numbers" if fixed else "a list"]
    elif not words:
        limits = {bound: schema[bound] for bound, _ in _BOUNDS if bound in schema}
        limits = {bound: int(limit) if limit == int(limit) else limit for bound, limit in limits.items()}  # 1.0 is 1
        bounds = [f"{sign} {limits[bound]}" for bound, sign in _BOUNDS if bound in limits]
        if limits.keys() == {"minimum", "maximum"}:
            bounds = [f"from {limits['minimum']} to {limits['maximum']}"]
        words = [" ".join([_NAMES.get(kind, "another value"), " and ".join(bounds)]).rstrip()]
    words += ["null"] * schema.get("or_null", False)
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _choices(schema: Mapping[str, Any]) -> list[str]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _key_hint(location: Location) -> str:
    keys = list((schema_at(location[:-1]) or {}).get("properties", ()))
    key = str(location[-1])
    # For `epochs=3` at the top level, the key is right and its section is missing.
    inside = [f"{name}.{key}" for name in keys if key in (schema_at([name]) or {}).get("properties", ())]
    if len(location) == 1 and inside:
        return f"did you mean {' or '.join(map(repr, inside))}?"
    return did_you_mean(key, keys) or f"valid keys: {', '.join(keys)}"


def _value_hint(schema: Mapping[str, Any], value: Any) -> str:
    hint = ""
    kind = schema.get("type", "")
    if isinstance(value, str):
        unquoted = parse_yaml(value).value
        hint = (
            "write it without quotes"
            if type(unquoted) in _TYPES.get(kind, ())
            else did_you_mean(value, _choices(schema))
        )
    elif kind == "string" and isinstance(value, bool | int | float) and not _choices(schema):
        hint = "write it in quotes"
    return f"; {hint}" if hint else ""


def _of_validator(location: Location, message: str) -> tuple[Location, str]:
    """Move the key that a validator's message begins with (`amp: 'fp16' needs ...`) into the location."""
    key, separator, rest = message.partition(": ")
    named = (*location, *key.split("."))
    return (named, rest) if separator and schema_at(named) is not None else (location, message)
