"""Models of torchvision and other libraries: prepared, trained, exported, verified; in bounded time and memory.

    python -m benchmarks.zoo                                  # all 109; those that are kept already are not repeated
    python -m benchmarks.zoo --only 'swin*' --again --jobs 2
    python -m benchmarks.zoo --library timm                   # transformers, ultralytics: has to be installed
    python -m benchmarks.zoo --again --without-export         # half the time; what files were like is kept, and said
    python -m benchmarks.zoo --oldest --minutes 60            # rows by age, at nice 19; the next run goes on from there
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.kept import kept
from benchmarks.zoo_age import names_in, oldest, said
from benchmarks.zoo_models import NAMES, family_of, names_of
from benchmarks.zoo_table import results_of, verdict
from qat.atomic_write import atomic_write

ROOT = Path(__file__).resolve().parents[1]
PAGE = os.sysconf("SC_PAGE_SIZE")
POLL_SECONDS = 0.2
FILES = ("export", "runtime")
"""The steps of a model's files."""
KEEPING = threading.Lock()
"""Held while a row is put among the kept ones."""


@dataclass(frozen=True)
class Bounds:
    """What one model may take."""

    seconds: float  # wall-clock time
    gib: float  # resident memory: CUDA builds of torch reserve address space, which rules out a limit by the kernel
    threads: int  # of torch


def measured(name: str, bounds: Bounds, command: list[str]) -> dict[str, Any]:
    """What a process says of one model; if it ended early, with the step in which it did, and why."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "row.json", Path(folder) / "log"
        why = _run([*command, "--threads", str(bounds.threads), "--row", str(path)], bounds, log)
        facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": {}}
    if why is not None:
        facts["steps"][facts.pop("running", "build")] = {"ok": False, "reason": why}
    family = family_of(name)
    about = {"name": name, "family": family, "family_size": len(names_of(family))}
    return {**about, **facts, "seconds": round(time.monotonic() - started, 1)}


def _run(command: list[str], bounds: Bounds, log: Path) -> str | None:
    """Why a process ended early, or was stopped; None if all went well."""
    ends = time.monotonic() + bounds.seconds
    # glibc would keep most of what large models free: three times their size
    environment = {**os.environ, "OMP_NUM_THREADS": str(bounds.threads), "MALLOC_MMAP_THRESHOLD_": str(2**26)}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            if time.monotonic() > ends:
                return f"took more than {bounds.seconds:g} s"
            if resident_gib(process.pid) > bounds.gib:
                return f"took more than {bounds.gib:g} GiB"
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
        code = process.wait()
    last = ([line for line in log.read_text().splitlines() if line.strip()] or ["nothing said"])[-1]
    if code < 0:
        return f"ended by signal {-code}"
    return f"ended with status {code}: {last[:200]}" if code else None


def resident_gib(process: int) -> float:
    """Memory that a process holds; 0 once it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError, IndexError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE / 2**30
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


def chosen(patterns: list[str], library: str = "torchvision") -> list[str]:
    """The names of a library's models that fit one of the patterns; ValueError if there is none."""
    found = [
        name for name in names_in(library) if any(fnmatchcase(name.rpartition("/")[2], pattern) for pattern in patterns)
    ]
    if not found:
        raise ValueError(f"--only {' '.join(patterns)}: no model of {library} is called so")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["torchvision", *NAMES], default="torchvision")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names, as in a shell")
    parser.add_argument("--oldest", action="store_true", help="of all libraries, the oldest rows first, at nice 19")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no model after these")
    parser.add_argument("--again", action="store_true", help="measure those that are kept already too")
    parser.add_argument("--without-export", action="store_true", help="keep what the files of a model were like")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each")
    parser.add_argument("--seconds", type=float, default=1800, help="bound on the time of one model")
    parser.add_argument("--gib", type=float, default=20, help="bound on the memory of one model")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    bounds = Bounds(given.seconds, given.gib, given.threads)
    case = [sys.executable, "-m", "benchmarks.zoo_case"]
    more = ["--without-export"] * given.without_export
    ends = time.monotonic() + 60 * given.minutes
    if given.oldest:
        os.nice(19)
        models = oldest()
    else:
        done = set() if given.again else {row["name"] for row in kept(given.results or results_of(given.library))}
        models = [(given.library, name) for name in chosen(given.only, given.library) if name not in done]

    def run(library: str, name: str) -> None:
        if time.monotonic() < ends:
            row = measured(name, bounds, [*case, name, *more])
            with KEEPING:
                found = keep(row, given.results or results_of(library))
            print(f"{found['name']}: {verdict(found)} ({found['seconds']:.0f} s)", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        try:
            for started in as_completed([pool.submit(run, *model) for model in models]):
                started.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    print(said())


if __name__ == "__main__":
    main()
