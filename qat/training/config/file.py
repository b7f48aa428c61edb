"""Read a config file and `key.path=value` overrides into a `RunConfig`; write one.

The YAML is PyYAML's safe subset without the traps of YAML 1.1: `1e-3` is a number, only `true` and `false` are booleans
(`off` and `no` are text), `010` and `1:30` are text, and a duplicate key is an error.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from qat.quantizer.training import LOW_BITS
from qat.text import did_you_mean, first_line, unprintable
from qat.training.config.schema import OverrideConfig, RunConfig
from qat.training.config.stages import Section
from qat.training.errors import UserError, problems_of

# The first line of a written config.
NULLS = "null leaves a choice to the target, the data set or the model; layers.txt shows every layer's grid"


def load_config(path: str, overrides: Sequence[str] = (), config_folder: Path | None = None) -> RunConfig:
    """Read a config file, apply the overrides and check the result.

    A bare name is also looked up in `config_folder`. An override is `key.path=value`, with the value in YAML. Later
    ones win, and a section given as a whole replaces the file's. Paths stay relative to the current folder.
    """
    file = _find(path, config_folder)
    with problems_of(str(file)):
        tree = parse_yaml(_read(file))
        if not isinstance(tree, dict):
            raise UserError(f"expected keys and values, such as data: {{name: digits}}, got {as_text(tree)}")
    tree.setdefault("name", file.stem)
    for typed in overrides:
        with problems_of(typed):
            _apply(tree, typed)
    try:
        # JSON mode is strict about types, but accepts a list where the schema has a tuple.
        return RunConfig.model_validate_json(json.dumps(with_choices_by_bits(tree)), strict=True)
    except ValidationError as error:
        raise UserError(*sentences_of(error, str(file), overrides)) from None


def dump_config(config: RunConfig) -> str:
    """Return the config with all defaults as YAML; `load_config` reads an equal one."""
    text = yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return f"# {NULLS}\n{text}"


def _find(path: str, config_folder: Path | None) -> Path:
    given, suffixes = Path(path), (".yaml", ".yml")
    folders = [given.parent, *([config_folder] if config_folder is not None and given.name == path else [])]
    for file in (folder / (given.name + suffix) for folder in folders for suffix in ("", *suffixes)):
        if os.path.exists(file) and not os.path.isdir(file):  # without permission, Path.exists would raise
            return file
    existing = {}
    for folder in filter(None, (config_folder, given.parent)):
        for file in (each for suffix in suffixes for each in folder.glob(f"*{suffix}")):
            existing[file.stem] = file.name if folder is config_folder else str(file)
    wanted = given.stem if given.suffix in suffixes else given.name
    listed = f"there are: {', '.join(sorted(existing.values()))}" if existing else "no config lies there"
    hint = did_you_mean(wanted, existing, count=3, shown=existing.__getitem__) or listed
    places = " and ".join(str(folder.absolute()) for folder in folders)
    raise UserError(f"config {path!r}: not found in {places}; {hint}")


def _read(file: Path) -> str:
    try:
        with open(file, encoding="utf-8-sig") as opened:
            return opened.read(LARGEST + 1)  # the file may be /dev/zero, or a checkpoint
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text; a config is a YAML file saved as UTF-8") from None


def _apply(tree: dict[str, Any], typed: str) -> None:
    key, separator, text = typed.partition("=")
    path = key.strip().split(".")
    if path[:2] == ["quantization", "overrides"]:  # a layer pattern keeps its dots: layer1.0 in ...layer1.0.skip
        end = next((i for i in range(3, len(path)) if path[i] in OverrideConfig.model_fields), len(path))
        path[2:end] = [".".join(path[2:end])] if len(path) > 2 else []
    if not separator or not all(path):
        raise UserError("expected key.path=value, such as qat.lr=0.01")
    node = tree
    for depth, step in enumerate(path[:-1], start=1):
        if node.get(step) is None:
            node[step] = {}
        node = node[step]
        if not isinstance(node, dict):
            raise UserError(f"{dotted(path[:depth])!r} is {as_text(node)}, which has no keys of its own")
    node[path[-1]] = parse_yaml(text)


TENSORS = ("weight", "activation")

SGD_RATE = 0.01
ADAMW_RATE = 5e-4  # at 4 bits; doubled for every bit less, since the levels of weights are further apart


def with_choices_by_bits(tree: object) -> Any:
    """Return a config's mapping with optimizer and lr of `qat` chosen by bits.

    AdamW up to `LOW_BITS` bits, else SGD; `qat.progressive` gets rates too. Each key is chosen on its own: whoever sets
    lr keeps the optimizer of the bits. The schema refuses what is not a mapping. Measured on 5,000 held-out training
    images of CIFAR-10 (docs/measurements.md).

    >>> with_choices_by_bits({"quantization": {"weight": {"bits": 2}, "activation": {"bits": 4}}})["qat"]
    {'optimizer': 'adamw', 'lr': 0.002}
    >>> with_choices_by_bits({"qat": {"lr": 0.001}, "quantization": {"weight": {"bits": 2}}})["qat"]
    {'optimizer': 'adamw', 'lr': 0.001}
    >>> with_choices_by_bits({})["qat"]
    {'optimizer': 'sgd', 'lr': 0.01}
    """
    if not isinstance(tree, dict) or not isinstance(stage := tree.get("qat", {}), dict):
        return tree
    bits = _bits(tree.get("quantization"), dict.fromkeys(TENSORS, 8))
    fewest = min(bits.values())
    optimizer = stage.get("optimizer", "adamw" if fewest <= LOW_BITS else "sgd")
    stage = {"optimizer": optimizer, "lr": rate(optimizer, fewest), **stage}
    earlier = stage.get("progressive")
    if "lr" not in tree.get("qat", {}) and isinstance(earlier, list | tuple):
        stage["progressive"] = list(earlier)
        for number, each in enumerate(earlier):
            if isinstance(each, dict) and each:  # the schema refuses an empty one
                common = _whole(each.get("bits"))
                own = _bits(each, bits if common is None else dict.fromkeys(TENSORS, common))
                stage["progressive"][number] = {"lr": rate(optimizer, min(own.values())), **each}
    return {**tree, "qat": stage}


def rate(optimizer: object, bits: int) -> float:
    """Return the peak learning rate for weights on so many bits, 1 to 16.

    >>> [rate("adamw", bits) for bits in (1, 2, 3, 4, 8, 16)]
    [0.002, 0.002, 0.001, 0.0005, 3.125e-05, 3.125e-05]
    """
    return ADAMW_RATE * 2.0 ** (LOW_BITS - min(max(bits, 2), 8)) if optimizer == "adamw" else SGD_RATE


def _bits(grids: object, default: dict[str, int]) -> dict[str, int]:
    specs = {tensor: _section(_section(grids).get(tensor)) for tensor in TENSORS}
    given = {tensor: _whole(spec.get("bits")) for tensor, spec in specs.items()}
    return {tensor: default[tensor] if bits is None else bits for tensor, bits in given.items()}


# The config is not yet checked: a section or a number may be anything.
def _section(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def sentences_of(error: ValidationError, source: str, overrides: Sequence[str]) -> list[str]:
    """Return pydantic's errors as a sentence each.

    It names the file or the override that set the value, the key, and what is wrong.
    """
    lines = []
    for problem in error.errors(include_url=False):
        location, message, value = problem["loc"], problem["msg"], problem["input"]
        if problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
        elif problem["type"] == "extra_forbidden":
            keys, key = keys_at(location[:-1]), str(location[-1])
            # For `epochs=3` at the top level, the key is right and its section is missing.
            inside = [f"{name}.{key}" for name in keys if len(location) == 1 and key in keys_at([name])]
            meant = f"did you mean {' or '.join(map(repr, inside))}?" if inside else did_you_mean(key, keys)
            message = f"unknown key; {meant or 'valid keys: ' + ', '.join(keys)}"
        else:
            choices = re.findall("'([^']+)'", str(problem.get("ctx", {}).get("expected", "")))
            hint = did_you_mean(str(value), choices)
            message = f"{message[0].lower()}{message[1:]}, got {as_text(value)}{hint and f'; {hint}'}"
        sentence = f"{dotted(location)}: {message}" if location else message
        key = f"{dotted(location) or sentence.partition(':')[0]}.".replace("[", ".")
        own = {each: f"{each.partition('=')[0].strip()}." for each in overrides}
        typed = [each for each in overrides if key.startswith(own[each]) or own[each].startswith(key)]
        lines.append(f"{typed[-1] if typed else source}: {sentence}")
    return lines


def keys_at(location: Sequence[str | int]) -> list[str]:
    """Return the keys of the section at a location; none where the user chooses them."""
    section: type[Section] | None = RunConfig
    for step in location:
        if section is not None and step in section.model_fields:  # else an element, or a name that the user chooses
            section = _section_in(section.model_fields[str(step)].annotation)
    return list(section.model_fields) if section is not None else []


def dotted(location: Sequence[str | int]) -> str:
    """Return a location as the user writes it: `qat.lr`, `data.mean[1]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")


def as_text(value: object) -> str:
    """Return a value as YAML on one line, of at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _section_in(annotation: object) -> type[Section] | None:
    inner = get_args(annotation)
    if inner:
        return next(filter(None, map(_section_in, inner)), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their full keys, as a user writes them.

    >>> flat({"qat": {"lr": 0.1, "progressive": [{"bits": 8}]}, "seed": 3})
    {'qat.lr': 0.1, 'qat.progressive[0].bits': 8, 'seed': 3}
    """
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            found |= flat({f"{key}[{index}]": each for index, each in enumerate(value)}, prefix)
        else:
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


LARGEST = 1_000_000  # characters of a config with its aliases written out: a few lines of them can fill all memory
_PREFIX = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
# Kinds of plain words, by their pattern and possible first characters; everything else is text. Python refuses
# decimal integers of more than 4300 digits, so long ones stay text.
_KINDS = {
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,999})$"), list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "merge": (re.compile(r"<<$"), ["<"]),
}


def parse_yaml(text: str) -> Any:
    """Read one YAML document; UserError has a sentence for each problem."""
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
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in sizes:
        sizes[id(node)] = 0  # ends the recursion of a node that contains itself, which is reported elsewhere
        parts = (part for item in node.value for part in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = 1 + sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's way: a class attribute, filled below)
    yaml_constructors = {
        _PREFIX + kind: yaml.SafeLoader.yaml_constructors[_PREFIX + kind]
        for kind in ("null", "bool", "float", "str", "seq", "map")
    } | {None: yaml.SafeLoader.yaml_constructors[None]}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[str] = []

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if wrong := unprintable([node.value]):
            self.problems.append(f"line {node.start_mark.line + 1}: {wrong}")
        return node

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


class _Dumper(yaml.SafeDumper):  # it also quotes text which only `_Loader` reads as a number, such as '1e-3'
    pass


for _kind, (_pattern, _first) in _KINDS.items():
    _Loader.add_implicit_resolver(_PREFIX + _kind, _pattern, _first)
_Loader.add_constructor(_PREFIX + "int", lambda _, node: int(node.value.replace("_", "")))
_Dumper.add_implicit_resolver(_PREFIX + "float", *_KINDS["float"])
