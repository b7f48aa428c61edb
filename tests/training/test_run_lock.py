"""Two runs never write into one folder, and a run that crashed leaves it free."""

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_training import user_error

from qat.training.run.files import write_text
from qat.training.run.lock import LOCK, FolderInUseError, RunLock, check_folder

HOST = socket.gethostname()
HOLDER = """
import os, sys, time
from pathlib import Path
from qat.training.run.lock import RunLock
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


def refusal(folder: Path) -> str:
    with pytest.raises(FolderInUseError) as raised:
        RunLock(folder)
    return str(raised.value)


def in_use(folder: Path, process: int) -> str:
    return (
        f"{folder}: another run writes there (process {process} on {HOST}); wait for its end, or choose another run_dir"
    )


def test_another_process_is_kept_out_until_it_crashes(tmp_path: Path) -> None:
    with other_process(tmp_path) as (process, _):
        for _ in range(2):  # looking at the lock of another leaves it
            assert refusal(tmp_path) == in_use(tmp_path, process.pid)
        process.kill()
        process.wait()
        assert (tmp_path / LOCK).exists()
        RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_loader_processes_that_outlive_their_parent_hold_no_lock(tmp_path: Path) -> None:
    with other_process(tmp_path, "fork") as (process, child):
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)  # it lives
            RunLock(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_two_runs_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert refusal(tmp_path / ".." / tmp_path.name) == in_use(tmp_path / ".." / tmp_path.name, os.getpid())
    lock.release()
    lock.release()
    again = RunLock(tmp_path)
    lock.release()  # a second release does nothing
    assert refusal(tmp_path) == in_use(tmp_path, os.getpid())
    again.release()


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


@pytest.mark.parametrize("how", ["link", "chdir"])
def test_a_folder_name_that_leads_elsewhere_now_is_noticed(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name may now lead to a folder that another run has locked."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run_dir = tmp_path / "now" if how == "link" else Path("one")
    (tmp_path / "now").symlink_to("one")
    monkeypatch.chdir(tmp_path)
    lock = RunLock(run_dir)
    write_text(lock.folder / "x", "ours")
    if how == "chdir":
        monkeypatch.chdir(tmp_path / "two")
        write_text(lock.folder / "x", "ours still")
        assert (tmp_path / "one" / "x").read_text() == "ours still"
    else:
        run_dir.unlink()
        run_dir.symlink_to("two")
        said = user_error(write_text, lock.folder / "x", "ours")
        assert said.startswith(f"{run_dir}: the run folder or its .lock was moved, deleted or replaced")
    assert list((tmp_path / "two").iterdir()) == []
    lock.release()


def test_a_lock_file_removed_while_it_is_opened_is_locked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = os.read, []

    def read(descriptor: int, size: int) -> bytes:
        if not taken:
            taken.append((tmp_path / LOCK).unlink())  # the holder ends between open and lock
        return real(descriptor, size)

    with monkeypatch.context() as patch:
        patch.setattr("os.read", read)
        lock = RunLock(tmp_path)
    lock.check()
    lock.release()


def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    with caplog.at_level(logging.WARNING, logger="qat"):
        lock = RunLock(tmp_path)
    assert caplog.messages == [
        f"{tmp_path}: its file system has no locks (No locks available); nothing keeps a second run out of it"
    ]
    lock.check()
    lock.release()


def test_a_run_that_crashed_on_another_host_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="qat"):
        for harmless in (f"4321 {HOST}\n", " \n"):
            (tmp_path / LOCK).write_text(harmless)
            RunLock(tmp_path).release()
        assert caplog.messages == []
        (tmp_path / LOCK).write_text("4321 elsewhere\n")
        RunLock(tmp_path).release()
    assert caplog.messages == [
        f"{tmp_path}: the last run here, process 4321 on elsewhere, did not end by itself; make sure that it does not"
        " run any more, as some file systems lock for one host only"
    ]


def test_release_hides_no_error_and_frees_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    lock = RunLock(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        lock.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lock._descriptor)
    RunLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_platform_without_locks_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qat.training.run.lock.fcntl", None)
    said = user_error(RunLock, tmp_path)
    assert said == f"{tmp_path}: a run needs POSIX's file locks, which are missing; use Linux, macOS or WSL"


def test_a_lock_that_cannot_be_written_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        said = user_error(RunLock, tmp_path)
    assert said == f"{tmp_path}/.lock: cannot lock the run folder (No space left on device)"
    RunLock(tmp_path).release()
