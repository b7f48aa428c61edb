"""The GPU's command: parts that fail, die or take too long are rows, and the others run. tests/house rehearses all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_steps
from benchmarks.gpu_parts import Bench, difference
from benchmarks.gpu_steps import steps

REHEARSAL = Bench("cpu", emulated=True)


def broken(bench: Bench) -> Iterator[gpu.Row]:
    yield {"subject": "first", "ok": True}
    print("what it printed")
    raise RuntimeError("no such kernel")


def killed(bench: Bench) -> Iterator[gpu.Row]:
    yield {"subject": "first", "ok": True}
    os.kill(os.getpid(), signal.SIGKILL)


def fine(bench: Bench) -> Iterator[gpu.Row]:
    yield {"subject": "last", "ok": True}


def endless(bench: Bench) -> Iterator[gpu.Row]:
    child = subprocess.Popen(["sleep", "1000"])
    yield {"subject": str(child.pid), "ok": True}
    time.sleep(1000)


def test_what_fails_dies_or_takes_too_long_is_a_row_and_the_next_part_runs() -> None:
    parts = {
        "broken": (broken, 60.0),
        "killed": (killed, 60.0),
        "endless": (endless, 2.0),
        "fine": (fine, 60.0),
    }
    rows = gpu.measured(REHEARSAL, parts)
    last = {row["part"]: row for row in rows}
    assert [row["part"] for row in rows if row["subject"] == "first"] == ["broken", "killed"]  # rows before stay
    assert "no such kernel" in last["broken"]["note"] and "what it printed" in last["broken"]["note"]
    assert last["killed"]["note"] == "its process ended with -9"
    assert last["endless"]["note"] == "ended at its limit of 2 s"
    assert last["fine"]["ok"]
    child = next(row["subject"] for row in rows if row["part"] == "endless")
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
    text = gpu.table(rows, {"machine": {"processor": "one"}, "versions": {}, "date": "today"})
    assert "## broken: 1 of 2" in text and "no such kernel" in text


def test_a_mode_that_fails_leaves_the_other_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **how: object) -> object:
        raise RuntimeError("no graphs")

    monkeypatch.setattr(gpu_steps, "MODES", ("graphs", "eager"))
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fails)
    rows = list(steps(REHEARSAL))
    assert {row["precision"] for row in rows} == set(gpu_steps.PRECISIONS)
    assert {row["note"] for row in rows} == {"fails: RuntimeError: no graphs"}


def test_all_parts_end_in_eight_minutes_and_leave_some_to_the_last() -> None:
    *others, last = (limit for _, limit in gpu.PARTS.values())
    left = gpu.WHOLE - sum(others)
    assert last >= left >= 100
    assert gpu.WHOLE + 2 * gpu.GRACE + 20 <= 480  # to put the last part away, and to import torch


def test_a_nan_and_a_wrong_value_are_differences() -> None:
    assert difference(torch.tensor([1.0, float("nan")]), [1.0, 2.0]) == float("inf")
    assert difference(torch.tensor([1.0, 4.0]), [1.0, 2.0]) == 1.0


def test_a_bare_machine_has_no_pydantic_and_still_has_all_but_the_script() -> None:
    code = "import sys; sys.modules.update(pydantic=None, tensorboard=None); import benchmarks.gpu"
    subprocess.run([sys.executable, "-c", code], cwd=gpu.__file__.rpartition("/benchmarks/")[0], check=True)
