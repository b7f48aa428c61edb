"""Two runs never write into one folder, and a run that crashed leaves it free."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qat.training.run.folder import LOCK, RunLock, check_folder, write_text
from tests.runs.tiny_training import Logged, Patch, user_error

HOLDER = """
import os, sys, time
from pathlib import Path
from qat.training.run.folder import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork() if "fork" in sys.argv else 1
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


@contextmanager
def other_process(folder: Path, *words: str) -> Iterator["tuple[subprocess.Popen[str], int]"]:
    """A process that holds the lock, and the process id that it prints."""
    command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(folder), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


IN_USE = "another run writes there; wait for its end, or choose another run_dir"


def test_another_process_is_kept_out_until_it_crashes(tmp_path: Path) -> None:
    with other_process(tmp_path) as (process, _):
        for _ in range(2):  # looking at the lock of another leaves it
            assert user_error(RunLock, tmp_path) == f"{tmp_path}: {IN_USE}"
        process.kill()
        process.wait()
        RunLock(tmp_path).release()


def test_loader_processes_that_outlive_their_parent_hold_no_lock(tmp_path: Path) -> None:
    with other_process(tmp_path, "fork") as (process, child):
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)  # it lives
            RunLock(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_was_moved_or_replaced_is_noticed(tmp_path: Path) -> None:
    folder, said = tmp_path / "x", []
    folder.mkdir()
    check_folder(folder)  # not locked: nothing to say
    lock = RunLock(folder)
    check_folder(folder)
    folder.rename(tmp_path / "y")
    for replaced in (False, True):
        if replaced:
            folder.mkdir()
            (folder / LOCK).write_text("1 elsewhere")
        said.append(user_error(write_text, folder / "x", "ours"))
    assert said == 2 * [
        f"{folder}: the run folder or its .lock was moved, deleted or replaced while the run wrote there; the run"
        " ends, so that it does not write into another's"
    ]
    lock.release()
    assert (folder / LOCK).read_text() == "1 elsewhere"  # not ours to remove


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: Patch, caplog: Logged) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    with caplog.at_level(logging.WARNING, logger="qat"):
        RunLock(tmp_path).release()
    assert "No locks available" in caplog.text


def test_two_runs_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert IN_USE in user_error(RunLock, tmp_path / ".." / tmp_path.name)
    lock.release()
    again = RunLock(tmp_path)
    lock.release()  # a second release does nothing
    assert IN_USE in user_error(RunLock, tmp_path)
    again.release()


def test_a_lock_file_removed_while_it_is_opened_is_locked_again(tmp_path: Path, monkeypatch: Patch) -> None:
    real = fcntl.lockf

    def lockf(descriptor: int, how: int) -> None:
        real(descriptor, how)
        monkeypatch.setattr("fcntl.lockf", real)
        (tmp_path / LOCK).unlink()  # its holder ended between open and lock

    monkeypatch.setattr("fcntl.lockf", lockf)
    lock = RunLock(tmp_path)
    assert (tmp_path / LOCK).exists()
    lock.release()
