"""One variant of one model in a fresh process: its first step, a later one, and how far memory rises in a step.

    python -m benchmarks.speed_alone qat --model resnet18 --row row.json

`alone` starts such a process, with compiler caches in a folder that the caller chooses.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed_memory import peak_growth
from benchmarks.speed_step import Setting, build_float, build_step

ROOT = Path(__file__).resolve().parents[1]
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "xdg"}
"""Environment variables of the caches, and their folders in the one that is given."""

FREED_GOES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For glibc: larger pieces are returned to the system when they are freed, so that resident memory is used memory."""

LONGEST = 1800
"""Seconds after which a process is stopped."""


def alone(
    variant: str, setting: Setting, threads: int, caches: Path | None = None, memory: bool = False
) -> dict[str, Any]:
    """Measure in a new process.

    Args:
        variant: as in `speed_variants`.
        setting: what is trained.
        threads: of torch.
        caches: folder of the compilers' caches; None: those of the user.
        memory: whether memory is what counts; malloc then gives everything back at once, which costs time.

    Returns:
        `preparation`, `first_step` and `later_step` in seconds, and `peak_growth` in bytes, or None.

    Raises:
        RuntimeError: with the last line that the process wrote, if it failed.
    """
    own = {variable: str(caches / folder) for variable, folder in CACHES.items()} if caches else {}
    environment = {**os.environ, **own, **(FREED_GOES_BACK if memory else {}), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks.speed_alone", variant, "--setting", json.dumps(asdict(setting))]
        command += ["--threads", str(threads), "--row", str(path)]
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST)
        if ended.returncode != 0:
            last = ([line for line in ended.stderr.splitlines() if line.strip()] or ["nothing said"])[-1]
            raise RuntimeError(f"status {ended.returncode}: {last.strip()}")
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts


def measure(variant: str, setting: Setting) -> dict[str, Any]:
    """What `alone` returns, in this process."""
    model, images = build_float(setting), setting.images()
    started = time.perf_counter()
    step = build_step(variant, model, images, setting.amp)
    prepared = time.perf_counter()
    step()
    first = time.perf_counter()
    step()
    second = time.perf_counter()
    growth = peak_growth(step, setting.device)
    if problem := step.problem():
        raise ArithmeticError(problem)
    return {
        "preparation": prepared - started,
        "first_step": first - prepared,
        "later_step": second - first,
        "peak_growth": growth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant")
    parser.add_argument("--setting", type=json.loads, default={}, help="fields of the setting, as JSON")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--row", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    setting = Setting(**{"model": given.model, **given.setting})
    facts = measure(given.variant, setting)
    if given.row is None:
        print(json.dumps({"variant": given.variant, **asdict(setting), **facts}))
    else:
        given.row.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
