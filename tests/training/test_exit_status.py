"""Errors and signals end the command with one sentence and the status that a shell expects, without a traceback."""

import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

from qat.training.errors import UserError
from qat.training.run.exit_status import exit_status

RESUME = "resume=auto goes on from the last checkpoint"


def raises(error: BaseException | None) -> Callable[[], int]:
    def run() -> int:
        if error is None:
            return torch.empty(2**50, dtype=torch.uint8).ndim
        raise error

    return run


@pytest.mark.parametrize(("error", "status", "beginning"), [
    (UserError("one", "two"), 2, "one\ntwo"),
    (UserError("'\x1b[31m\udce9' is ü"), 2, r"'\x1b[31m\udce9' is ü"),
    (KeyboardInterrupt(), 130, f"interrupted; {RESUME}"),
    (OSError(28, "No space left on device", "/x/y"), 2, "/x/y: cannot be read or written (No space left on"),
    (OSError(5, "Input/output error"), 2, "cannot be read or written (Input/output error)"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried 20 MiB"), 2, "out of memory (CUDA out of memory. Tried 20"),
    (MemoryError(), 2, "out of memory (MemoryError); try a smaller data.batch_size"),
    (None, 2, "out of memory ("),  # what torch's own allocator says
    (RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. "), 2, "out of memory (DataLoader wor"),
])  # fmt: skip
def test_each_error_has_a_sentence_and_a_status(
    capsys: pytest.CaptureFixture[str], error: BaseException | None, status: int, beginning: str
) -> None:
    assert exit_status(raises(error)) == status
    said = capsys.readouterr().err
    assert said.startswith(beginning) and len(said.splitlines()) == max(1, beginning.count("\n") + 1)
    assert exit_status(raises(error), way_on="") == status and "resume" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), AssertionError("y"), SystemExit(0)])
def test_bugs_of_the_program_keep_their_traceback(capsys: pytest.CaptureFixture[str], error: BaseException) -> None:
    """Their status differs from that of a failed proof. `sys.exit()` in a user's module is one of them."""
    assert exit_status(raises(error)) == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith(type(error).__name__)


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
        assert capsys.readouterr().err == f"ended by {name}; {RESUME}\n"
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_handlers_that_others_set_stay() -> None:
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
