"""docs/config.md's tables: every key of the YAML with its type, its default and its docstring."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from benchmarks.kept import table
from qat.training.config.schema import RunConfig
from qat.training.config.stages import Section

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def config_table() -> str:
    """One section for each class of the schema, under the keys at which it stands."""
    places: dict[type[Section], list[str]] = {}
    for path, section in _sections("", RunConfig):
        places.setdefault(section, []).append(path)
    return "\n" + "\n".join(_section(section, paths) for section, paths in places.items()) + "\n"


def configs_table() -> str:
    """The shipped configs, with what the first lines of each say."""
    rows = [(f"`{path.name}`", first_sentence(path.read_text())) for path in sorted(CONFIGS.glob("*.yaml"))]
    return table(("config", "what it does"), rows)


def first_sentence(text: str) -> str:
    """The first sentence of the comment that a file begins with."""
    lines = [line[1:].strip() for line in re.match(r"(?:#.*\n)+", text)[0].splitlines()]  # type: ignore[index]
    return re.split(r"(?<=[.]) (?=[A-Z])", " ".join(lines))[0].rstrip(".:")


def _sections(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Yield a class of the schema and those that its fields hold, with the keys that lead there."""
    yield path, section
    for name, field in section.model_fields.items():
        for inner, key in _inner(field.annotation, f"{path}.{name}".lstrip(".")):
            yield from _sections(key, inner)


def _inner(annotation: Any, key: str) -> Iterator[tuple[type[Section], str]]:
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        yield annotation, key
    for part in get_args(annotation):
        holder = get_origin(annotation)
        yield from _inner(part, f"{key}.PATTERN" if holder is dict else f"{key}[]" if holder is tuple else key)


def _section(section: type[Section], paths: list[str]) -> str:
    about = " ".join((section.__doc__ or "").split())
    shown = ", ".join(f"`{path}`" for path in paths if path) or "Top level"
    own = section.__annotations__
    inherited = [base for base in section.__mro__[1:] if issubclass(base, Section) and base is not Section]
    more = f" It has the keys of {', '.join(base.__name__ for base in inherited)} too." if inherited else ""
    texts = _docstrings(section)
    rows = [
        (f"`{name}`", _type(field.annotation), _default(field), texts.get(name, ""))
        for name, field in section.model_fields.items()
        if name in own
    ]
    said = table(("key", "type", "default", "what it is"), rows)
    return f"## {shown}\n\n`{section.__name__}`: {about}{more}\n\n{said}"


def _docstrings(section: type[Section]) -> dict[str, str]:
    """The text below each field."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split())
            found[ast.unparse(field.target)] = text.replace("|", "\\|").replace("<", "&lt;")
    return found


def _type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if annotation is type(None):
        return "null"
    if inspect.isclass(annotation) and origin is None:
        return "section" if issubclass(annotation, Section) else annotation.__name__
    if origin in (list, tuple, dict):
        names = dict.fromkeys(_type(part) for part in parts if part is not Ellipsis)
        return f"{origin.__name__} of {', '.join(names)}"
    if hasattr(annotation, "__metadata__"):
        return _type(parts[0])
    return " or ".join(dict.fromkeys(_type(part) for part in parts)) or str(annotation)


def _default(field: Any) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, Section) or value in ((), {}, []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
