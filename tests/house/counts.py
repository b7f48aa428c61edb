"""What the house measures: `python tests/house/counts.py`. tests/house/test_layering.py holds the bounds."""

import ast
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

import qat
from qat.kernels import plain_formulas

PACKAGE = Path(qat.__file__).parent
ROOT = PACKAGE.parent


def passed(run: Callable[[], object]) -> list[str]:
    """The files of qat that a call passes, in the order of their first line."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            found[path.relative_to(PACKAGE).as_posix()] = None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(before)
    return list(found)


def files_to_round() -> list[str]:
    """From the call of a lone QuantConv2d in training to `torch.round` of its input."""

    class RoundReachedError(Exception):
        pass

    layer, x = qat.QuantConv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    qat.calibrate(layer, [x])
    layer.train()(x)

    def run() -> None:
        try:
            layer(x)
        except RoundReachedError:
            return
        raise AssertionError("the layer does not round")

    with mock.patch("torch.round", side_effect=RoundReachedError), plain_formulas():
        return passed(run)


def files_of_a_step() -> list[str]:
    """Forward and backward of convolution, BatchNorm and ReLU in a prepared model that trains on codes."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model = qat.prepare(float_model, example_inputs=x)
    qat.calibrate(model, [x])
    model.train()(x).sum().backward()
    return passed(lambda: model(x).sum().backward())


def modules() -> dict[str, Path]:
    """All modules of qat by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, known: dict[str, Path], at_once: bool = False) -> set[str]:
    """The modules of qat that a module imports: anywhere, or `at_once` when it is loaded."""
    found: set[str] = set()
    tree = ast.parse(known[module].read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{module}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in full}
    return {name for name in found if name in known and name != module}


def deepest_chains() -> dict[str, list[str]]:
    """The longest path of imports within each room (`qat.training` counts by its folders), as module names."""
    known = modules()
    found: dict[str, list[str]] = {}
    for room in sorted({_room(name) for name in known if name.count(".")}):
        inside = {name for name in known if _room(name) == room and known[name].name != "__init__.py"}

        @cache
        def chain(name: str, inside: frozenset[str] = frozenset(inside)) -> tuple[str, ...]:
            further = [chain(other) for other in sorted(imports_of(name, known) & inside)]
            return (name, *max(further, key=len, default=()))

        found[room] = list(max(map(chain, inside), key=len, default=()))
    return found


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["training"], ["codes"]) else 2])


def largest_folder(top: Path) -> tuple[int, str]:
    """The most Python files that lie in one folder, and its name."""
    folders = {path.parent for path in top.rglob("*.py")}
    return max((len(list(folder.glob("*.py"))), folder.relative_to(ROOT).as_posix()) for folder in folders)


def tables_of_operations(fewest: int = 10) -> list[str]:
    """The files with a constant that names so many of torch's operations."""
    calls, found = re.compile(r"\b(?:F|nn|torch)\.\w+"), []
    for path in PACKAGE.rglob("*.py"):
        constants = [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Assign, ast.AnnAssign))]
        if any(len({*calls.findall(ast.unparse(each))}) >= fewest for each in constants):
            found.append(path.relative_to(PACKAGE).as_posix())
    return found


def guards() -> list[str]:
    """The classes that say if a model is what it was, by an `is_unchanged` of their own."""
    trees = (ast.walk(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py"))
    classes = [node for tree in trees for node in tree if isinstance(node, ast.ClassDef)]
    return [each.name for each in classes if "is_unchanged" in {getattr(node, "name", "") for node in each.body}]


def lines(top: Path) -> int:
    """Lines of code and comments, C included."""
    sources = [path for path in top.rglob("*") if path.suffix in (".py", ".c", ".h")]
    return sum(len(path.read_text().splitlines()) for path in sources)


def main() -> None:
    """Print all counts."""
    found: dict[str, Any] = {"files to torch.round": files_to_round(), "files of a fused step": files_of_a_step()}
    for name, files in found.items():
        rooms = sorted({file.partition("/")[0] for file in files})
        print(f"{name}: {len(files)} in {len(rooms)} rooms ({', '.join(rooms)}): {' '.join(files)}")
    print(f"tables of operations: {tables_of_operations()}; guards: {guards()}")
    room, chain = max(deepest_chains().items(), key=lambda item: len(item[1]))
    print(f"deepest chain of imports in a room: {len(chain)} ({room}: {' > '.join(chain)})")
    for top in (PACKAGE, ROOT / "tests"):
        count, folder = largest_folder(top)
        print(f"{top.name}: {lines(top)} lines; most files in a folder: {count} ({folder})")


if __name__ == "__main__":
    main()
