"""docs/reference.md's tables: every public name with its call and the first sentence of its docstring."""

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path
from types import ModuleType

from benchmarks.kept import table

ROOT = Path(__file__).resolve().parents[1]

PLACES = (
    "qat",
    "qat.functional",
    "qat.layers",
    "qat.quantizer",
    "qat.targets",
    "qat.export",
    "qat.finetuning",
    "qat.post_training",
    "qat.testing",
    "qat.kernels",
)
"""The packages whose `__all__` is public, in the order of the page."""

TITLES = ("name", "what it is")


def reference_table() -> str:
    """A section a package. A name that several of them offer stands in the first."""
    sections = []
    names = public_names()
    for place in PLACES:
        package = importlib.import_module(place)
        own = [name.rpartition(".")[2] for name, (_, home) in names.items() if home == place]
        rows = [(_call(package, name), _escaped(first_sentence(package, name))) for name in own]
        sections.append(f"## {place}\n\n{_sentence_of(package.__doc__ or '')}\n\n{table(TITLES, rows)}")
    return "\n" + "\n".join(sections) + "\n"


def public_names() -> dict[str, tuple[object, str]]:
    """Every public name with its value and its package; a name that several packages offer has the first's."""
    found: dict[str, tuple[object, str]] = {}
    seen: set[str] = set()
    for place in PLACES:
        package = importlib.import_module(place)
        names = [name for name in sorted(package.__all__, key=str.lower) if name not in seen]
        seen.update(names)
        found |= {f"{place}.{name}": (getattr(package, name), place) for name in names}
    return found


def first_sentence(package: ModuleType, name: str) -> str:
    """What the docstring of a public name begins with; of a constant, the text below its assignment."""
    value = getattr(package, name)
    documented = inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)
    return _sentence_of((value.__doc__ if documented else _below_assignment(package, name)) or "")


def _sentence_of(text: str) -> str:
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)[0].rstrip(".:")


def _below_assignment(package: ModuleType, name: str) -> str | None:
    for path in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
        body = ast.parse(path.read_text()).body
        for statement, below in itertools.pairwise(body):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
            if named and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return str(below.value.value)
    return None


def _call(package: ModuleType, name: str) -> str:
    """The name, of a function with its arguments, as a link to the file that defines it."""
    value = getattr(package, name)
    arguments = ""
    if inspect.isroutine(value):
        signature = inspect.signature(value)
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        arguments = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    value = inspect.unwrap(value) if arguments else value  # what a decorator wraps
    source = inspect.getsourcefile(value) if arguments or inspect.isclass(value) or inspect.ismodule(value) else None
    text = f"`{_escaped(name + arguments)}`"
    return f"[{text}](../{Path(source).relative_to(ROOT)})" if source else text


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
