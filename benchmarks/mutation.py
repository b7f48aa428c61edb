"""How many mutations, small wrong edits of the code, the tests find.

python -m benchmarks.mutation                          # 50 mutations a room, two at a time; keeps results/mutation.json
python -m benchmarks.mutation --rooms functional --number 10

A room's mutations are those with the smallest digests of (function, line, edit), so that the same ones are taken again
after the code around them has changed. The room's own tests run file by file, first those that have found most; a
mutation that none of them fails on within the limit survives. Some survivors change nothing that can be seen. Files
that fail on the code as it is, in these forked processes, find nothing: they are left out and named.
"""

import argparse
import ast
import hashlib
import importlib
import itertools
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(__file__).resolve().parent / "results" / "mutation.json"
ROOMS = {
    "functional": ("qat/functional", ["tests/functional", "qat/functional"]),
    "quantizer": ("qat/quantizer", ["tests/quantizer", "qat/quantizer"]),
    "layers": ("qat/layers", ["tests/layers", "qat/layers"]),
    "codes/operators": ("qat/codes/operators", ["tests/codes", "tests/kernels"]),
    "integers": ("qat/integers", ["tests/export", "tests/integers", "tests/codes"]),
    "training/loop": ("qat/training/loop", ["tests/training", "tests/finetuning"]),
}
"""Room: its code and its tests."""

LIMIT = 240
"""Seconds for the tests of one mutation."""

COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Mod: "*", ast.FloorDiv: "*", ast.Pow: "*"}
JOINED = {ast.And: "or", ast.Or: "and"}


@dataclass(frozen=True)
class Mutation:
    """One edit: the text of `path` between two offsets in bytes becomes `text`."""

    path: str
    function: str
    line: str
    start: int
    end: int
    text: str

    @property
    def digest(self) -> str:
        """Of what is edited, wherever it stands."""
        return hashlib.sha256(f"{self.function}|{self.line}|{self.text}".encode()).hexdigest()

    def source(self) -> bytes:
        """The file with the edit."""
        given = (ROOT / self.path).read_bytes()
        return given[: self.start] + self.text.encode() + given[self.end :]

    def is_python(self) -> bool:
        """Whether the file can still be parsed: an edit may cut a bracket."""
        try:
            ast.parse(self.source())
        except SyntaxError:
            return False
        return True


def main() -> None:
    """Run the mutations of each room and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    # Every child is forked from this process and finds these imported.
    for name in ("numpy", "torch", "torchvision", "onnx", "onnxruntime", "pytest", "pydantic"):
        importlib.import_module(name)
    found = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"rooms": {}}
    found |= {"processor": platform.machine(), "python": platform.python_version()}
    for room in chosen.rooms:
        rows, left_out = score(room, chosen.number, chosen.jobs)
        killed = sum(row["killed_by"] is not None for row in rows)
        print(f"{room}: {killed} of {len(rows)} found", flush=True)
        found["rooms"][room] = {"mutations": len(rows), "found": killed, "left_out": left_out, "rows": rows}
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")


def score(room: str, number: int, jobs: int) -> tuple[list[dict[str, object]], list[str]]:
    """Run the room's tests on each of its mutations; the second are the files that fail without one."""
    folder, tests = ROOMS[room]
    ordered = sorted(candidates(folder), key=lambda mutation: mutation.digest)
    drawn = list(itertools.islice(filter(Mutation.is_python, ordered), number))
    files = [
        str(path.relative_to(ROOT))
        for place in tests
        for path in sorted((ROOT / place).rglob("*.py"))
        if path.name.startswith("test_") or (place.startswith("qat") and ">>>" in path.read_text())
    ]
    finds: Counter[str] = Counter()
    with ThreadPoolExecutor(jobs) as pool, tempfile.TemporaryDirectory() as scratch:
        sound = Path(scratch) / "sound"
        _copy_to(sound)
        passed = list(pool.map(lambda name: _passes(sound, name, time.monotonic() + LIMIT), files))
        left_out = [name for name, sane in zip(files, passed, strict=True) if not sane]
        print("left out:", *left_out, flush=True)
        files = [name for name in files if name not in left_out]
        places = [Path(scratch) / str(number) for number in range(len(drawn))]
        return list(pool.map(lambda each, place: _tried(each, files, finds, place), drawn, places)), left_out


def candidates(folder: str) -> Iterator[Mutation]:
    """Yield every edit of the functions of a folder that this script knows."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        source = path.read_bytes()
        lines = source.splitlines(keepends=True)
        starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]

        def offsets(node: ast.expr | ast.stmt, starts: list[int] = starts) -> tuple[int, int]:
            return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[operator]

        for function, node in _expressions(ast.parse(source), ""):
            for start, end, text in _edits(node, offsets, source):
                line = lines[node.lineno - 1].decode().strip()
                yield Mutation(str(path.relative_to(ROOT)), function, line, start, end, text)


def _expressions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield the nodes inside functions; sentences of errors and annotations are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.arguments):
            continue
        name = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}".lstrip(".")
        elif function and isinstance(child, ast.expr | ast.If | ast.While):
            yield function, child
        if isinstance(child, ast.FunctionDef):
            for statement in child.body:
                yield from _expressions(ast.Module([statement], []), name)
        else:
            yield from _expressions(child, name)


def _edits(node: ast.AST, offsets, source: bytes) -> Iterator[tuple[int, int, str]]:  # type: ignore[no-untyped-def]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield offsets(node.left)[1], offsets(node.comparators[0])[0], f" {COMPARED[type(node.ops[0])]} "
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        between = source[offsets(node.left)[1] : offsets(node.right)[0]]
        if not set(between) & set(b"()"):
            yield offsets(node.left)[1], offsets(node.right)[0], f" {COMPUTED[type(node.op)]} "
    elif isinstance(node, ast.BoolOp):
        yield offsets(node.values[0])[1], offsets(node.values[1])[0], f" {JOINED[type(node.op)]} "
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield (*offsets(node)[:1], offsets(node.operand)[0], "")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield (*offsets(node), str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield (*offsets(node), repr(node.value + 1))
    elif isinstance(node, ast.If):
        yield (*offsets(node.test), f"(not ({source[slice(*offsets(node.test))].decode()}))")


def _tried(mutation: Mutation, files: list[str], finds: Counter[str], copy: Path) -> dict[str, object]:
    """Return what became of a mutation, in a copy of the tree that is removed again."""
    _copy_to(copy)
    (copy / mutation.path).write_bytes(mutation.source())
    row: dict[str, object] = {"path": mutation.path, "function": mutation.function, "line": mutation.line}
    row |= {"edit": mutation.text.strip(), "killed_by": None}
    try:
        ends = time.monotonic() + LIMIT
        for name in sorted(files, key=lambda name: -finds[name]):
            if time.monotonic() > ends:
                break
            if not _passes(copy, name, ends):
                finds[name] += 1
                row["killed_by"] = name
                break
    finally:
        shutil.rmtree(copy)
    print(json.dumps(row), flush=True)
    return row


def _copy_to(copy: Path) -> None:
    for name in ("qat", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "train.py", "README.md", "configs", "docs", "benchmarks", "examples"):
        (copy / name).symlink_to(ROOT / name)


def _passes(copy: Path, name: str, ends: float) -> bool:
    """Whether a file of tests passes in a child of this process; what is still running at the limit passes."""
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 1
        try:
            status = _run(copy, name)
        finally:
            os._exit(status)
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) in (0, 5)  # 5: the file has slow tests only
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _run(copy: Path, name: str) -> int:
    import pytest

    sys.modules["__main__"] = types.ModuleType("__main__")  # what a test spawns would import this script again
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        options = ["-o", "addopts=", "--doctest-modules", "-m", "not slow", "-x", "-q", "--timeout=100"]
        return int(pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:xdist", name]))


if __name__ == "__main__":
    main()
