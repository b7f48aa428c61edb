"""Errors and signals end the command with one sentence and the status that a shell expects, without a traceback."""

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qat.training.errors import UserError
from qat.training.run.exit_status import exit_status
from qat.training.run.logging import RunLog

HOW_TO_RESUME = "resume=auto goes on from the last finished epoch"
LOST = (
    "data.workers: a loader process was lost ({}), as one is that finds too little memory; try fewer of them;"
    f" {HOW_TO_RESUME}"
)


def raises(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (UserError("one", "two"), 2, "one\ntwo"),
        (KeyboardInterrupt(), 130, f"interrupted; {HOW_TO_RESUME}"),
        (
            OSError(28, "No space left on device", "/x/y"),
            2,
            f"/x/y: cannot be read or written (No space left on device); {HOW_TO_RESUME}",
        ),
        (OSError(5, "Input/output error"), 2, f"cannot be read or written (Input/output error); {HOW_TO_RESUME}"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"),
            2,
            f"out of memory for 20.00 MiB more; try a smaller data.batch_size or data.image_size; {HOW_TO_RESUME}",
        ),
        (MemoryError(), 2, f"out of memory; try a smaller data.batch_size or data.image_size; {HOW_TO_RESUME}"),
        (
            RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "),
            2,
            LOST.format("DataLoader worker (pid 12) is killed by signal: Killed"),
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly"),
            2,
            LOST.format("DataLoader worker (pid(s) 12, 13) exited"),
        ),
    ],
)
def test_each_error_has_a_sentence_and_a_status(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, sentence: str
) -> None:
    assert exit_status(raises(error)) == status
    assert capsys.readouterr().err == sentence + "\n"


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes"), ValueError("x"), AssertionError("y"), SystemExit(0)]
)
def test_bugs_of_the_program_keep_their_traceback(capsys: pytest.CaptureFixture[str], error: BaseException) -> None:
    """Their status differs from that of a failed proof. `sys.exit()` in a user's module is one of them."""
    assert exit_status(raises(error)) == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith(type(error).__name__)


def test_a_pipe_to_a_loader_is_not_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    reader.close()

    def run() -> int:
        writer.send(1)
        return 0

    assert exit_status(run) == 2
    assert capsys.readouterr().err == LOST.format("[Errno 32] Broken pipe") + "\n"


def test_memory_that_torch_cannot_allocate_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: torch.empty(2**50, dtype=torch.uint8).ndim) == 2
    said = capsys.readouterr().err
    assert said.startswith("out of memory for 1125899906842624 bytes more; ") and len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_schedulers_signal_ends_a_run_like_ctrl_c(capsys: pytest.CaptureFixture[str], name: str) -> None:
    number, ended = getattr(signal, name), []
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so in a run

    def run() -> int:
        try:
            os.kill(os.getpid(), number)
            raise AssertionError("the signal came too late")
        finally:
            os.kill(os.getpid(), number)  # a second signal changes nothing
            ended.append(True)

    try:
        assert exit_status(run) == 128 + number and ended == [True]
        assert capsys.readouterr().err == f"ended by {name}; {HOW_TO_RESUME}\n"
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_while_an_error_is_reported_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def slow(*sentences: str, **_: object) -> None:
        said.extend(sentences)
        if len(said) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("builtins.print", slow)
    assert exit_status(raises(UserError("first"))) == 2
    assert said == ["first"]


def test_handlers_that_others_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert exit_status(lambda: os.kill(os.getpid(), signal.SIGHUP) or 5) == 5  # type: ignore[func-returns-value]
    finally:
        signal.signal(signal.SIGHUP, before)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(exit_status(lambda: 7)))
    thread.start()
    thread.join()
    assert statuses == [7]


def closed_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return io.TextIOWrapper(os.fdopen(writer, "wb"), write_through=False)


def test_a_pipe_that_closes_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def say() -> int:
        RunLog(tmp_path).say("run folder")
        return 0

    for run in (say, lambda: print("short") or 0):  # the second is only flushed at the end
        with monkeypatch.context() as patch, closed_pipe() as output:
            patch.setattr("sys.stdout", output)
            assert exit_status(run) == 141
            output.flush()  # as Python does at exit; nothing is left that could fail
        assert capsys.readouterr().err == f"standard output was closed; {HOW_TO_RESUME}\n"


def test_closed_outputs_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_pipe() as output, closed_pipe() as errors:
        monkeypatch.setattr("sys.stdout", output)
        monkeypatch.setattr("sys.stderr", errors)
        assert exit_status(raises(UserError("x"))) == 2
        errors.flush()
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert exit_status(raises(UserError("x"))) == 2
    assert exit_status(lambda: RunLog(tmp_path).say("x") or 3) == 3  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    "run",
    [lambda: RunLog(Path()).say("x") or 0, lambda: print("only flushed at the end") or 0],  # type: ignore[func-returns-value]
)
def test_a_full_output_is_a_sentence(
    run: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as output, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", output)
        assert exit_status(run) == 2
        output.flush()  # as Python does at exit; the stream now goes to the null device
    expected = f"standard output: cannot write to it (No space left on device); {HOW_TO_RESUME}\n"
    assert capsys.readouterr().err == expected


def test_characters_that_a_terminal_lacks_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    assert exit_status(lambda: RunLog(tmp_path).say("runs/été-\udcff") or 0) == 0  # type: ignore[func-returns-value]
    assert raw.getvalue() == b"runs/\\xe9t\\xe9-\\udcff\n"
    assert output.errors == "strict"


LOADING = """
import multiprocessing, os, signal, sys, torch
from qat.training.config.schema import DataConfig
from qat.training.data.loaders import load_data
from qat.training.run.exit_status import exit_status

data = load_data(DataConfig(name="fake", image_size=8, workers=2), 0, torch.device("cpu"), channels_last=False)

def run():
    for _ in data.train:
        for process in multiprocessing.active_children():
            os.kill(process.pid, getattr(signal, sys.argv[1]))
        if sys.argv[1] == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
    return 0

sys.exit(exit_status(run))
"""


@pytest.mark.parametrize(
    ("name", "status", "sentence"),
    [
        ("SIGKILL", 2, re.escape(LOST).replace(r"\{\}", ".+")),
        ("SIGTERM", 143, f"ended by SIGTERM; {HOW_TO_RESUME}"),  # a scheduler asks the whole group to end
    ],
)
def test_killed_loader_processes_are_reported_in_one_sentence(name: str, status: int, sentence: str) -> None:
    """In a subprocess, because torch raises for each dead loader process wherever the main thread is."""
    shown = subprocess.run([sys.executable, "-c", LOADING, name], capture_output=True, text=True)
    assert shown.returncode == status and re.fullmatch(f"{sentence}\n", shown.stderr), shown.stderr
