"""Imports point downwards only: the floors of docs/house.md, held to the source; and its promises, counted."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qat.kernels.cpu import compiler
from tests.house import counts

ROOT = Path(__file__).resolve().parents[2]


def floors() -> list[tuple[str, ...]]:
    """From the ground up, as docs/house.md has them. A module may import from its own floor and from those below."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs" / "house.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(rows)))
    return [tuple(re.findall(r"`([\w.]+)`", names)) for _, names in rows]


FLOORS = floors()
SCRIPTS = ("qat.training", "qat.cli", "qat.__main__")
HEAVY = ("yaml", "pydantic", "torchvision", "tensorboard", "onnx", "onnxscript", "onnxruntime", "torch._dynamo")


def floor_of(module: str) -> int | None:
    for number, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return None


MODULES = counts.modules()


@pytest.mark.parametrize("module", [name for name in MODULES if name != "qat"])
def test_imports_point_downwards(module: str) -> None:
    own = floor_of(module)
    assert own is not None, f"{module} stands on no floor of the house; add it to docs/house.md"
    for name in counts.imports_of(module, MODULES):
        floor = floor_of(name)
        if floor is None:
            # `from qat import x` goes through the roof; only the training script's parts live above it.
            assert module.startswith(SCRIPTS), f"{module} imports {name} from the package's face"
        else:
            assert floor <= own, f"{module} imports {name}, which stands above it"


def test_nothing_in_the_library_knows_the_training_script() -> None:
    for module in MODULES:
        if not module.startswith((*SCRIPTS, "qat.loading")):  # the way back from its run folders
            uses = {name for name in counts.imports_of(module, MODULES) if name.startswith("qat.training")}
            assert not uses, f"{module} imports {uses}"


def test_importing_qat_loads_nothing_heavy() -> None:
    code = f"import sys, qat, qat.testing; print([name for name in {HEAVY!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("path", MODULES.values(), ids=list(MODULES))
def test_files_hold_one_idea(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 450, f"{path.name} has {lines} lines; one concept a file, up to 450"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1
            start = node.body[1].lineno if documented else node.lineno
            assert (node.end_lineno or 0) - start < 60, f"{path.name}: {node.name} is longer than 60 lines"
    assert path.stem not in ("utils", "common", "helpers", "misc")


TOTALS = {"qat": (39_277, "py", "c", "h"), "tests": (32_861, "py")}
"""Lines, at most: they go down, and up only in a commit that changes nothing else and says what users get for it."""


@pytest.mark.parametrize("folder", TOTALS)
def test_the_house_stays_within_its_lines(folder: str) -> None:
    most, *kinds = TOTALS[folder]
    files = [path for kind in kinds for path in (ROOT / folder).rglob(f"*.{kind}")]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= most, f"{folder} has {lines} lines, and {most} are the most; delete first"


def test_imports_form_no_circle() -> None:
    """Of what is imported when a module is loaded; a function may import its caller's room late."""
    imports = {name: counts.imports_of(name, MODULES, at_once=True) for name in MODULES}
    assert list(graphlib.TopologicalSorter(imports).static_order())


def test_every_room_of_the_map_is_there_and_every_file_that_it_names() -> None:
    page = (ROOT / "docs" / "house.md").read_text()
    assert {name for floor in FLOORS for name in floor} <= MODULES.keys()
    named = set(re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.\w+)?)`", page))
    assert len(named) > 20
    places = [ROOT, ROOT / "qat", ROOT / "qat" / "kernels", ROOT / "qat" / "quantizer", ROOT / "qat" / "codes"]
    places += [ROOT / "qat" / "training", ROOT / "qat" / "export"]
    lost = {name for name in named if not any((place / name).exists() for place in places)}
    assert not lost


def test_the_evening_tour_takes_an_evening() -> None:
    page = (ROOT / "docs" / "house.md").read_text()
    tour = page[page.index("## An evening tour") : page.index("## Two walks")]
    files = re.findall(r"`(qat/[\w/]+\.py)`", tour)
    assert 10 < len(files) <= 18
    assert sum(len((ROOT / name).read_text().splitlines()) for name in files) <= 3500


def test_a_layer_alone_reaches_torch_round_in_six_files() -> None:
    assert len(counts.files_to_round()) <= 6


@pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
def test_a_fused_step_stays_in_two_rooms_and_what_torch_keeps_private() -> None:
    files = counts.files_of_a_step()
    assert len(files) <= 15
    assert {file.partition("/")[0] for file in files} == {"codes", "graph", "kernels", "torch_internals.py"}


def test_what_an_operation_is_and_whether_a_model_changed_is_told_once() -> None:
    assert counts.tables_of_operations() == ["graph/operations.py"] and counts.guards() == ["Snapshot"]


def test_rooms_are_shallow_and_folders_small() -> None:
    assert {room: chain for room, chain in counts.deepest_chains().items() if len(chain) > 6} == {}
    assert counts.largest_folder(counts.PACKAGE)[0] <= 16
    assert counts.largest_folder(counts.ROOT / "tests")[0] <= 20
