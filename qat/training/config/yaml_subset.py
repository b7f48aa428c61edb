"""The YAML of the config files: PyYAML's safe subset without the traps of YAML 1.1.

`1e-3` is a number, only `true` and `false` are booleans (`off` and `no` are text), `010` and `1:30` are text rather
than 8 and 90, and a duplicate key is an error instead of a silent overwrite.
"""

import json
import re
from typing import Any

import yaml

from qat.text import first_line
from qat.training.errors import UserError

LARGEST = 1_000_000
"""Most characters of a config. Aliases count expanded: a few lines of them can expand to more than all memory."""

_PREFIX = "tag:yaml.org,2002:"
_DIGITS = "0123456789"
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
# Python refuses decimal integers of more than 4300 digits, so long ones stay text.
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,999})$")

# (tag, pattern of a plain word, its possible first characters); everything else is text
_KINDS: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", _INT, list("-+" + _DIGITS)),
    ("float", _FLOAT, list("-+." + _DIGITS)),
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("merge", re.compile(r"<<$"), ["<"]),
)


def parse_yaml(text: str) -> Any:
    """Read one YAML document; None if it is empty. A UserError has a sentence for each problem."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None and _size(node, {}) > LARGEST:
            raise UserError(f"it is longer than {LARGEST:,} characters, aliases (*) written out")
        value = None if node is None else loader.construct_document(node)
        if loader.problems:
            raise UserError(*loader.problems)
        # The way through JSON makes copies of aliased mappings, so that a change to one leaves the others alone. It
        # also finds mappings that contain themselves.
        return json.loads(json.dumps(value))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{where}not valid YAML: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"not a config: {first_line(error)}") from None


def _size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Count the characters of an expanded node, plus one per node; each node is measured once."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in sizes:
        sizes[id(node)] = 0  # ends the recursion of a node that contains itself, which is reported elsewhere
        parts = (part for item in node.value for part in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]


def dump_yaml(value: Any) -> str:
    """Write plain values as YAML that `parse_yaml` (and any YAML 1.1 reader) reads back to equal values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own resolvers and constructors; the global one is not changed."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's way: a class attribute, filled below)
    yaml_constructors = {
        _PREFIX + kind: yaml.SafeLoader.yaml_constructors[_PREFIX + kind]
        for kind in ("null", "bool", "float", "str", "seq", "map")
    } | {None: yaml.SafeLoader.yaml_constructors[None]}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        assert node is not None
        # The keys are checked here, because in construct_mapping merging (`<<`) may add keys that are already there.
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a single word", key.start_mark)
            line = key.start_mark.line + 1
            if key.tag not in (_PREFIX + "str", _PREFIX + "merge"):
                self.problems.append(f"line {line}: the key {key.value} is not text; write it in quotes")
                key.tag = _PREFIX + "str"
            if key.value in first_lines:
                first = first_lines[key.value]
                self.problems.append(f"line {line}: {key.value!r} is already set on line {first}; keep one of them")
            first_lines.setdefault(key.value, line)
        return node

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node).replace("_", ""))


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which only `_Loader` reads as a number, such as '1e-3'."""


for _tag, _pattern, _first in _KINDS:
    _Loader.add_implicit_resolver(_PREFIX + _tag, _pattern, _first)
_Loader.add_constructor(_PREFIX + "int", _Loader.construct_int)
_Dumper.add_implicit_resolver(_PREFIX + "float", _FLOAT, list("-+." + _DIGITS))
