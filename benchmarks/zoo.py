"""Models of torchvision and other libraries: prepared, trained, exported, verified; in bounded time and memory.

    python -m benchmarks.zoo                                  # all 109; those that are kept already are not repeated
    python -m benchmarks.zoo --only 'swin*' --again --jobs 2
    python -m benchmarks.zoo --library timm                   # transformers, ultralytics: has to be installed
    python -m benchmarks.zoo --again --without-export         # half the time; what files were like is kept, and said
    python -m benchmarks.document                             # docs/zoo.md's tables from what is kept

One process and one line a model, in benchmarks/results/zoo.jsonl (zoo_timm.jsonl for a library), whatever happens
to it: a model that fails, takes too long or too much memory is a line that says in which step and why.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.zoo_models import FAMILIES, NAMES, family_of, names_of
from benchmarks.zoo_table import kept, results_of, verdict
from qat.atomic_write import atomic_write

ROOT = Path(__file__).resolve().parents[1]
PAGE = os.sysconf("SC_PAGE_SIZE")
POLL_SECONDS = 0.2
FILES = ("export", "runtime")
"""The steps of a model's files."""


@dataclass(frozen=True)
class Bounds:
    """What one model may take.

    Attributes:
        seconds: wall-clock time.
        gib: resident memory; looked at several times a second, since CUDA builds of torch reserve address space that
            they never use, which rules out a limit by the kernel.
        threads: of torch.
    """

    seconds: float
    gib: float
    threads: int


class Child:
    """A process that measures one model, or another command that writes a row."""

    def __init__(self, name: str, bounds: Bounds, folder: Path, command: list[str]) -> None:
        self.name = name
        self.bounds = bounds
        self.row_path = folder / f"{name.replace('/', '_')}.json"
        self.log = self.row_path.with_suffix(".log")
        threads = str(bounds.threads)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--threads", threads, "--row", str(self.row_path)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": threads},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.started = time.monotonic()
        self.stopped_because: str | None = None

    def running(self) -> bool:
        """Whether it still runs; stops it if it is over its bounds."""
        if self.process.poll() is not None:
            return False
        if time.monotonic() - self.started > self.bounds.seconds:
            self.stopped_because = f"took more than {self.bounds.seconds:g} s"
        elif resident_gib(self.process.pid) > self.bounds.gib:
            self.stopped_because = f"took more than {self.bounds.gib:g} GiB"
        if self.stopped_because is None:
            return True
        self.process.kill()
        self.process.wait()
        return False

    def row(self) -> dict[str, Any]:
        """What it wrote; if it ended early, with the step in which it did."""
        facts: dict[str, Any] = json.loads(self.row_path.read_text()) if self.row_path.exists() else {"steps": {}}
        why = self.stopped_because
        if why is None and self.process.returncode != 0:
            last = ([line for line in self.log.read_text().splitlines() if line.strip()] or ["nothing said"])[-1]
            code = self.process.returncode
            why = f"ended by signal {-code}" if code < 0 else f"ended with status {code}: {last[:200]}"
        if why is not None:
            facts["steps"][facts.pop("running", "build")] = {"ok": False, "reason": why}
        family = family_of(self.name)
        return {
            "name": self.name,
            "family": family,
            "family_size": len(names_of(family)),
            **facts,
            "seconds": round(time.monotonic() - self.started, 1),
        }


def resident_gib(process: int) -> float:
    """Memory that a process holds; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE / 2**30
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0


def keep(row: dict[str, Any], results: Path) -> dict[str, Any]:
    """Put the row among the kept ones, in the place of an older one, whose files it keeps if it has none itself."""
    rows = {old["name"]: old for old in kept(results)}
    steps, before = row.get("steps", {}), rows.get(row["name"], {})
    files = {step: facts for step, facts in before.get("steps", {}).items() if step in FILES}
    if "copy" in steps and "export" not in steps and files:
        row = row | {"steps": steps | files, "files_of": before.get("files_of", before.get("commit", "before"))}
    rows[row["name"]] = row
    results.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(results) as temporary:
        temporary.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))
    return row


def measure_all(names: list[str], bounds: Bounds, jobs: int, results: Path, exports: bool = True) -> None:
    """Measure the models, `jobs` at a time, and keep every row as soon as it is there."""
    waiting, children = list(names), list[Child]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or children:
                while waiting and len(children) < jobs:
                    name = waiting.pop(0)
                    command = [sys.executable, "-m", "benchmarks.zoo_case", name]
                    children.append(Child(name, bounds, Path(folder), command + ["--without-export"] * (not exports)))
                for child in [child for child in children if not child.running()]:
                    children.remove(child)
                    row = child.row()
                    row = keep(row, results)
                    print(f"{row['name']}: {verdict(row)} ({row['seconds']:.0f} s)", flush=True)
                time.sleep(POLL_SECONDS)
        finally:
            for child in children:
                child.process.kill()
                child.process.wait()


def chosen(patterns: list[str], library: str = "torchvision") -> list[str]:
    """The names of a library's models that fit one of the patterns.

    Raises:
        ValueError: if there is none.
    """
    names = [name for family in (FAMILIES if library == "torchvision" else [library]) for name in names_of(family)]
    found = [name for name in names if any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in patterns)]
    if not found:
        raise ValueError(f"--only {' '.join(patterns)}: no model of {library} is called so")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["torchvision", *NAMES], default="torchvision")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names, as in a shell")
    parser.add_argument("--again", action="store_true", help="measure those that are kept already too")
    parser.add_argument("--without-export", action="store_true", help="keep what the files of a model were like")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each")
    parser.add_argument("--seconds", type=float, default=1800, help="bound on the time of one model")
    parser.add_argument("--gib", type=float, default=20, help="bound on the memory of one model")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    results = given.results or results_of(given.library)
    done = set() if given.again else {row["name"] for row in kept(results)}
    names = [name for name in chosen(given.only, given.library) if name not in done]
    bounds = Bounds(given.seconds, given.gib, given.threads)
    measure_all(names, bounds, given.jobs, results, not given.without_export)


if __name__ == "__main__":
    main()
