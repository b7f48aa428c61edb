"""Everything that is known only on a GPU, in one command: within 8 minutes, on a bare machine with torch.

    python -m benchmarks.gpu --out FOLDER              # FOLDER/gpu.json and FOLDER/gpu.md
    python -m benchmarks.gpu --out FOLDER --emulate    # the same parts on the CPU, small: a rehearsal
    python -m benchmarks.gpu --out FOLDER --parts estimators steps
    python -m benchmarks.gpu --count resnet50 64       # no device: kernels and bytes of a step, one line of JSON

Every part runs in a process of its own, so that neither an error of the device nor a deadlock takes the others along.
One that fails is a row with its reason; one that takes too long ends at its limit, and keeps the rows that it has. The
parts `run` and `ranks` start train.py, and need its packages (pydantic, onnx, onnxruntime, tensorboard).
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_count import count_of
from benchmarks.gpu_parts import Bench, estimators, ranks, run
from benchmarks.gpu_steps import steps
from benchmarks.speed_rows import Row, facts_of_run
from benchmarks.speed_timing import reason

Part = Callable[[Bench], Iterator[Row]]

PARTS: dict[str, tuple[Part, float]] = {
    "estimators": (estimators, 40),
    "run": (run, 100),
    "ranks": (ranks, 60),
    "steps": (steps, 450),
}
"""In the order in which they run, what is right before what is fast; and how many seconds each has at most."""

WHOLE = 450.0
"""Seconds for all parts together: what the others leave is for the last."""

GRACE = 5.0
"""Seconds in which a part that is asked to end puts its own processes away."""


def measured(bench: Bench, parts: Mapping[str, tuple[Part, float]], whole: float = WHOLE) -> list[Row]:
    """The rows of all parts."""
    # Its server imports torch once, and never touches the device: a fork of a process that did could not use it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_steps", "qat", "torchvision"])
    rows: list[Row] = []
    began = time.monotonic()
    for name, (part, limit) in parts.items():
        started = time.monotonic()
        left = min(limit, began + whole - started)
        own = _rows_of(context, bench, part, left)
        rows += ({"part": name, **row} for row in own)
        failed, seconds = sum(not row["ok"] for row in own), time.monotonic() - started
        print(f"{name}: {failed} of {len(own)} failed, {seconds:.0f} s", file=sys.stderr, flush=True)
    return rows


def _rows_of(context: Any, bench: Bench, part: Part, limit: float) -> list[Row]:
    """What a part finds in its own process until the limit; the last row says why it ended before its end."""
    receiver, sender = context.Pipe(duplex=False)
    rows: list[Row] = []
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = context.Process(target=_in_process, args=(part, bench, sender, output.name))
        process.start()
        sender.close()
        ends = time.monotonic() + limit
        why: str | None = f"ended at its limit of {limit:.0f} s"
        try:
            while receiver.poll(max(0.0, ends - time.monotonic())):
                rows.append(receiver.recv())
        except EOFError:
            process.join(GRACE)
            why = f"its process ended with {process.exitcode}" if process.exitcode else None
        _end(process)
        said = output.read().strip()
    if why is not None:
        rows.append({"subject": "the part", "ok": False, "note": why})
    failed = [row for row in rows if not row["ok"]]
    if failed and said:
        failed[-1]["note"] = f"{failed[-1].get('note', '')} said: {said[-400:]}"
    return rows


def _in_process(part: Part, bench: Bench, sender: Connection, output: str) -> None:
    """Run a part, and send its rows. What it prints goes to the file."""
    os.setsid()  # it ends with all that it starts
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    warnings.simplefilter("ignore")
    if bench.emulated:
        torch.set_num_threads(1)  # on tensors this small threads only wait for each other
    try:
        for row in part(bench):
            sender.send(row)
    except BaseException as error:
        sender.send({"subject": "the part", "ok": False, "note": reason(error)})
        traceback.print_exc()


def _end(process: BaseProcess) -> None:
    """End the process with all of its group; torchrun ends its ranks if it is asked, not if it is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, number)
        process.join(GRACE)
    process.kill()  # if it had no group of its own yet
    process.join()


def table(rows: list[Row], about: Row) -> str:
    """The report: a line for each row that says more than that all is well."""
    lines = [f"On {about['machine'].get('gpu', about['machine']['processor'])}, {about['versions']}, {about['date']}."]
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        right = sum(row["ok"] for row in own)
        lines += ["", f"## {part}: {right} of {len(own)}", ""]
        shown = [row for row in own if not row["ok"] or row.keys() & {"seconds", "note"}]
        if shown:
            keys = [key for key in dict.fromkeys(key for row in shown for key in row) if key != "part"]
            lines += [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
            lines += [f"| {' | '.join(_cell(row.get(key)) for key in keys)} |" for row in shown]
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return "" if value is None else text.replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    """Measure, write both files, and say whether a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="a folder")
    parser.add_argument("--count", nargs=2, metavar=("MODEL", "BATCH"), help="count kernels and bytes, on no device")
    parser.add_argument("--emulate", action="store_true", help="on the CPU, small")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args(arguments)
    if given.count:
        print(json.dumps(count_of(given.count[0], int(given.count[1]))))
        return 0
    bench = Bench("cpu", emulated=True) if given.emulate else Bench()
    if bench.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --emulate rehearses on the CPU")
    about = facts_of_run()
    began = time.monotonic()
    rows = measured(bench, {name: PARTS[name] for name in given.parts})
    about |= {"emulated": bench.emulated, "seconds": round(time.monotonic() - began, 1)}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    text = table(rows, about)
    (given.out / "gpu.md").write_text(text)
    print(text)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
