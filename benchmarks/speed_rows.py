"""The rows of the speed benchmark: what they say, and how they are kept.

A row is one variant of one comparison: case, subject, setting, variant, and what was measured, with the machine, the
versions and the date. A comparison that is measured again replaces its rows as a whole, since ratios hold within one
run only.
"""

import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import kept
from qat.atomic_write import atomic_write

Row = dict[str, Any]

PACKAGES = ("torch", "torchvision", "torchao", "brevitas", "triton")
COMPARISON = ("case", "subject", "batch", "size", "device")
"""What rows of one comparison have in common, beside the processor and what it can do."""

INTEGER_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "asimddp", "i8mm")
"""Flags of /proc/cpuinfo that say which integer and bf16 products the processor has."""


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """The processor, what it can do with integers, the threads in use, how busy it was, and the GPU if there is one."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    known = set(flags[1].split()) if flags else set()
    # Not the run report's processor_name: qat.training needs pydantic, which a bare machine may lack.
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    facts: dict[str, Any] = {
        "processor": named[1].strip() if named else platform.processor() or platform.machine(),
        "flags": [flag for flag in INTEGER_FLAGS if flag in known],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def facts_of_run(packages: Sequence[str] = PACKAGES) -> Row:
    """What every row of a run ends with; taken before measuring, so that `load` is that of others."""
    return {"versions": versions(packages), "machine": machine(), "date": time.strftime("%Y-%m-%d")}


def keep(rows: Iterable[Row], results: Path) -> None:
    """Add rows; older ones of the same comparisons go."""
    fresh = list(rows)
    measured = set(map(comparison, fresh))
    lines = [row for row in kept(results) if comparison(row) not in measured] + fresh
    results.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(results) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in lines))


def comparison(row: Row) -> tuple[Any, ...]:
    """What a row shares with those that it is compared with."""
    return *(row[name] for name in COMPARISON), row["machine"]["processor"], *row["machine"]["flags"]


def conditions_of(row: Row) -> str:
    """The machine and the versions of a row, in words."""
    machine = row["machine"]
    flags = f" with {', '.join(machine['flags'])}" if machine["flags"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in row["versions"].items())
    return f"{machine['processor']}{flags}, {machine['threads']} of {machine['cores']} threads; {versions}"
