"""torch's private names stand in qat/torch_internals.py only, and each one is there."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([ROOT / "train.py", *(ROOT / "qat").rglob("*.py")])
HOME = ROOT / "qat" / "torch_internals.py"
OVERRIDDEN = {"_apply", "_conv_forward", "_load_from_state_dict", "_save_to_state_dict"}
"""Methods that torch means subclasses to override: to call one's own is fair."""

CTYPES = {"_fields_"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.expr) -> bool:
    """Whether this is the object itself, or its base class: `self`, `cls`, `super()`."""
    return ast.unparse(node) in ("self", "cls", "super()")


def defined_in(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return found


TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
OURS = set().union(*(defined_in(tree) for tree in TREES.values()))
TORCHS = {name for kind in (nn.Module(), nn.LSTM(1, 1), torch.zeros(1), fx.Graph()) for name in dir(kind)}


def private_names(tree: ast.AST) -> list[str]:
    """Private names of torch that a file uses: modules, what it imports from them, and attributes."""
    known = (OURS - TORCHS) | defined_in(tree) | OVERRIDDEN | CTYPES
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [f"{node.module}.{each.name}" for each in node.names if "._" in f"{node.module}.{each.name}"]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("torch.") and "._" in each.name]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            found.append(str(node.value))
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo", "from torch._C import _functorch", "from torch.utils import _pytree as pytree",
        "torch._int_mm(a, b)", "module._buffers", "self._parameters", "buffer._version", "torch.ops.mkldnn._linear(x)",
        "importlib.import_module('torch._dynamo')",
    ],
)  # fmt: skip
def test_the_count_finds_private_names(line: str) -> None:
    assert private_names(ast.parse(line)), f"{line} uses a private name of torch"


def test_private_names_of_torch_stand_in_one_module() -> None:
    others = [path for path in SOURCES if path != HOME]
    found = [f"{path.relative_to(ROOT)}: {name}" for path in others for name in private_names(TREES[path])]
    assert not found, f"give these a name in qat/torch_internals.py: {found}"


def private_paths() -> list[str]:
    """What the one module takes from modules of torch."""
    found = private_names(TREES[HOME])
    dotted = [name for name in found if name.startswith(("torch.", "forward_ad."))]
    return sorted({name.replace("forward_ad.", "torch.autograd.forward_ad.") for name in dotted})


@pytest.mark.parametrize("name", private_paths())
def test_torch_still_has(name: str) -> None:
    found: Any = torch
    done = "torch"
    for step in name.split(".")[1:]:
        if not hasattr(found, step):
            try:
                importlib.import_module(f"{done}.{step}")
            except ImportError:
                pytest.fail(f"torch {torch.__version__} has no {name}, which qat/torch_internals.py uses")
        found, done = getattr(found, step), f"{done}.{step}"
