"""The command: check many programs, print shrunk failures, and write the counts to a file."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from benchmarks.speed_rows import machine
from qat.kernels.cpu import onednn
from tests.fuzz.checking import Verdict, check, checked
from tests.fuzz.program import Program
from tests.fuzz.shrinking import shrink

KINDS = ("agrees", "fails", "refused", "unclear", "discarded", "exported", "litert", "compiled")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if nothing fails."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--out", type=Path, help="a JSON file for the result; rewritten every 50 cases")
    parser.add_argument("--runtime-every", type=int, default=10, help="cases that are exported; 0 for none")
    parser.add_argument("--compiled-every", type=int, default=0, help="cases that are compiled; 0 for none")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases; needs --out")
    options = parser.parse_args(arguments)
    if options.jobs > 1:
        return _shared(options)
    os.environ["QAT_SELF_CHECK"] = "off"  # it would hide errors of the engine; `check` asks for its verdict
    torch.set_num_threads(1)  # faster for small models
    begin, counts = time.time(), Counter[str]()
    result: dict[str, Any] = {**surroundings(), "first_seed": options.seed, "fails": [], "refused": [], "unclear": []}
    for done, seed in enumerate(range(options.seed, options.seed + options.cases), 1):
        runtime, compiled = _every(options.runtime_every, seed), _every(options.compiled_every, seed)
        program, verdict, discarded = checked(seed, runtime, compiled)
        counts += Counter({verdict.kind: 1, "discarded": discarded, "exported": runtime, "compiled": compiled})
        counts["litert"] += verdict.litert
        if verdict.kind != "agrees":
            told = report(program, verdict, runtime, compiled, not options.no_shrink)
            result[verdict.kind].append(told)
            print(told["script"], f"# {verdict.kind}: {verdict.stage}: {verdict.detail}\n", sep="\n", flush=True)
        counted = {**dict.fromkeys(KINDS, 0), **counts}
        result |= {"cases": done, "counts": counted, "seconds": round(time.time() - begin)}
        if options.out is not None and done % 50 == 0:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    _finish(result, options.out)
    return int(bool(result["fails"]))


def _shared(options: argparse.Namespace) -> int:
    """Run several processes on consecutive ranges of seeds and merge their results."""
    begin, share = time.time(), -(-options.cases // options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, first in enumerate(range(options.seed, options.seed + options.cases, share)):
            count = min(share, options.seed + options.cases - first)
            command = [sys.executable, "-m", "tests.fuzz", "--cases", str(count), "--seed", str(first)]
            command += ["--runtime-every", str(options.runtime_every), "--compiled-every", str(options.compiled_every)]
            command += ["--out", f"{folder}/{number}.json"] + ["--no-shrink"] * options.no_shrink
            running.append(subprocess.Popen(command))
        status = max(process.wait() for process in running)
        parts = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    result = {**parts[0], "cases": sum(part["cases"] for part in parts), "seconds": round(time.time() - begin)}
    result["counts"] = {kind: sum(part["counts"][kind] for part in parts) for kind in KINDS}
    for kind in ("fails", "refused", "unclear"):
        result[kind] = [told for part in parts for told in part[kind]]
    _finish(result, options.out)
    return status


def _finish(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("processor", "torch", "cases", "counts", "seconds")}))


def _every(number: int, seed: int) -> bool:
    return number > 0 and seed % number == 0


def report(program: Program, verdict: Verdict, runtime: bool, compiled: bool, shrinks: bool) -> dict[str, Any]:
    """The shrunk failure as an entry of the result file."""

    def fails(smaller: Program) -> bool:
        parts = ("ONNX" in verdict.stage, "compiled" in verdict.stage)
        return check(smaller, runtime and parts[0], compiled and parts[1]).is_like(verdict)

    small = shrink(program, fails) if shrinks and verdict.kind != "unclear" else program
    return {"seed": program.seed, "stage": verdict.stage, "detail": verdict.detail, "script": small.script()}


def surroundings() -> dict[str, Any]:
    """Versions and processor, which the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "processor": machine()["processor"],
        "exact integer products": onednn.are_exact("dense"),
    }


if __name__ == "__main__":
    raise SystemExit(main())
