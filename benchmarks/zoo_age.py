"""How old the zoo's rows are: commits behind this one, and whether the code that they speak of is still the same."""

import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.kept import kept
from benchmarks.zoo_libraries import NAMES
from benchmarks.zoo_models import FAMILIES, names_of
from benchmarks.zoo_table import results_of

ROOT = Path(__file__).resolve().parents[1]
MODEL = ("qat/torch_internals.py", "qat/functional", "qat/quantizer", "qat/layers", "qat/targets", "qat/recipe.py")
PARTS = {
    "capture": (*MODEL, "qat/graph", "qat/preparation", "qat/workflow.py"),
    "evaluation": (*MODEL, "qat/integers", "qat/codes", "qat/kernels", "qat/calibration.py"),
    "export": (*MODEL, "qat/integers", "qat/export"),
}
"""What each part of a row is about, and the code that decides it."""


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


@cache
def behind(commit: str | None) -> float:
    """How many commits lie between a row's and this one; infinity for one that is not known."""
    counted = git("rev-list", "--count", f"{commit}..HEAD")
    return float("inf") if counted.returncode else int(counted.stdout)


@cache
def same_code(commit: str, part: str) -> bool:
    """Whether nothing of what a part depends on has changed since a commit."""
    return git("diff", "--quiet", commit, "--", *PARTS[part]).returncode == 0


def libraries() -> list[str]:
    """Those whose models can be built here."""
    return ["torchvision", *(name for name in NAMES if find_spec(name))]


def names_in(library: str) -> list[str]:
    return [name for family in (FAMILIES if library == "torchvision" else [library]) for name in names_of(family)]


def oldest() -> list[tuple[str, str]]:
    """Libraries and names of all models: those without a row, those whose files are oldest, whose rest is."""

    def age(library: str, name: str) -> tuple[float, float]:
        row = known[library].get(name, {})
        commit = row.get("commit")
        return (behind(row.get("files_of", commit)), behind(commit))

    known: dict[str, dict[str, Any]] = {
        library: {row["name"]: row for row in kept(results_of(library))} for library in libraries()
    }
    models = [(library, name) for library in libraries() for name in names_in(library)]
    return sorted(models, key=lambda model: age(*model), reverse=True)


def said() -> str:
    """How many of all kept rows are of the code as it stands, for each part."""
    rows = [row for library in ("torchvision", *NAMES) for row in kept(results_of(library))]
    commits = {"capture": "commit", "evaluation": "commit", "export": "files_of"}
    fresh = {
        part: sum(same_code(row.get(key, row.get("commit", "")), part) for row in rows)
        for part, key in commits.items()
    }  # fmt: skip
    counted = ", ".join(f"{part} {count}" for part, count in fresh.items())
    return f"of {len(rows)} rows are of this commit's code: {counted}"
