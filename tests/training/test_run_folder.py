"""Which folder a run uses; that existing files are never touched, and that two runs never write into one folder."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qat.training.config.file import dump_config
from qat.training.config.schema import RunConfig
from qat.training.run import folder as run_folder
from qat.training.run.folder import LOCK, RunFolder, RunLock, check_folder, continues, open_run_folder, write_text
from tests.runs.tiny_training import Logged, Patch, user_error

pytestmark = pytest.mark.usefixtures("folder")


def make(*files: str) -> None:
    for file in files:
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_text("old")


def refusal(config: RunConfig) -> str:
    before = {path: path.is_file() and path.read_text() for path in Path().rglob("*")}
    said = user_error(lambda: [continues(config), open_run_folder(config)])
    assert {path: path.is_file() and path.read_text() for path in Path().rglob("*")} == before
    return said


@pytest.mark.parametrize(("files", "config", "path", "checkpoint"), [
    # The next number follows the highest; other names do not count.
    (["runs/x/", "runs/x-7/", "runs/x-y/", "runs/x-08/", "runs/xx-30/"], {"name": "x"}, "runs/x-8", None),
    (["runs/x/last.pt", "runs/x-2/last.pt", "runs/x-10/last.pt", "runs/x-11/config.yaml"],
     {"name": "x", "resume": "auto"},
     "runs/x-10",
     "runs/x-10/last.pt"),
    (["runs/x/config.yaml"], {"name": "x", "resume": "auto"}, "runs/x-2", None),
    (["mine/last.pt"], {"run_dir": "mine", "resume": "auto"}, "mine", "mine/last.pt"),
    *(
        (files, {"run_dir": path, "resume": resume}, path, None)
        for resume in ("never", "auto")
        for files, path in (
            ([], "new"),
            ([], "no/such/parent"),
            (["empty/"], "empty"),
            (["mine/.lock", "mine/.config.yaml.tmp"], "mine"),  # all that a killed run left
        )
    ),
])  # fmt: skip
def test_which_folder_a_run_uses(files: list[str], config: Any, path: str, checkpoint: str | None) -> None:
    make(*files)
    with open_run_folder(RunConfig(**config)) as folder:
        assert folder == RunFolder(Path(path).absolute(), checkpoint and Path(checkpoint))
        assert Path(path).is_dir()


def finished(summary: str = '{"onnx": {}, "exit_status": 0}', **config: Any) -> None:
    """A finished run in runs/x, without training and so without a last.pt."""
    make("runs/x/")
    Path("runs/x/config.yaml").write_text(dump_config(RunConfig(name="x", **config)))
    Path("runs/x/summary.json").write_text(summary)


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("place", [{"name": "x"}, {"run_dir": "runs/x"}])
def test_a_finished_run_keeps_its_exit_status(status: int, place: dict[str, str]) -> None:
    finished(f'{{"onnx": {{}}, "exit_status": {status}}}')
    before = sorted(Path().rglob("*"))
    assert open_run_folder(RunConfig(**place, resume="auto")) == RunFolder(Path("runs/x"), None, status)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("summary", ['{"exit_status": 0}', "", '{"onnx": {"top1"', "[]", "\0\0\0"])
def test_a_run_without_an_export_or_a_whole_summary_is_not_finished(summary: str) -> None:
    make("runs/x/last.pt")
    finished(summary, export={"onnx": False})
    with open_run_folder(RunConfig(name="x", resume="auto")) as folder:
        assert folder == RunFolder(Path("runs/x").absolute(), Path("runs/x/last.pt"))
    without = RunConfig(name="x", resume="auto", export={"onnx": False})
    with open_run_folder(without) as folder:
        assert (folder.finished == 0) == ("exit_status" in summary)


TRAINS, CALIBRATES = {"float": {"epochs": 1}}, {"qat": {"epochs": 0}}


@pytest.mark.parametrize(("files", "before", "never", "auto"), [
    # What a start leaves that found a broken image, or was killed; with float.epochs: 0, float weights are a copy.
    ([], TRAINS, True, True),
    (["curves", "layers.txt", ".last.pt.tmp", ".lock"], TRAINS, True, True),
    (["float.safetensors", "layers.txt"], {}, True, True),
    (["float.safetensors", "best.pt", "model.onnx", "summary.json"], CALIBRATES, False, True),  # export again
    # Weights whose last.pt was removed, finished runs, and a user's own files stay.
    (["float.safetensors"], TRAINS, False, False),
    (["float.safetensors", "best.pt"], {}, False, False),
    (["model.onnx"], {}, False, False),
    (["curves", "notes.txt"], {}, False, False),
])  # fmt: skip
def test_a_start_is_repeated_where_nothing_was_trained(
    files: list[str], before: dict[str, Any], never: bool, auto: bool
) -> None:
    make("x/", *(f"x/{file}" for file in files))
    Path("x/config.yaml").write_text(dump_config(RunConfig(**before)))
    for resume, allowed in (("never", never), ("auto", auto)):
        config = RunConfig(run_dir="x", resume=resume, **before)
        if not allowed:
            assert user_error(open_run_folder, config).startswith("run_dir: 'x' is not empty")
            continue
        with open_run_folder(config) as folder:
            assert folder == RunFolder(Path("x").absolute(), None)


def test_a_config_of_the_users_own_is_never_overwritten() -> None:
    make("x/")
    Path("x/config.yaml").write_text(f"# mine\n{dump_config(RunConfig())}")
    for resume in ("never", "auto"):
        assert refusal(RunConfig(run_dir="x", resume=resume)).startswith("run_dir: 'x' is not empty")


def test_a_numbered_folder_that_another_run_takes_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    make("runs/x/")
    monkeypatch.setattr(run_folder, "_numbered_folders", lambda name: {})  # the view of the slower run
    with open_run_folder(RunConfig(name="x")) as folder:
        assert folder == RunFolder(Path("runs/x-2").absolute(), None)


@pytest.mark.parametrize(("config", "sentence"), [
    ({"run_dir": "mine"}, "run_dir: 'mine' is not empty; choose another, or set resume=auto"),
    ({"run_dir": "other"}, "run_dir: 'other' is not empty; choose another"),
    ({"run_dir": "other", "resume": "auto"}, "run_dir: 'other' is not empty and has no last.pt to go on from; c"),
    ({"run_dir": "file", "resume": "auto"}, "run_dir: 'file' is not a folder; choose another"),
    ({"run_dir": "file/x"}, "run_dir: 'file/x': cannot use it (Not a directory); choose another"),
    ({"name": "x"}, "run_dir: 'runs': cannot use it (Not a directory); choose another"),
    *(({"name": name}, f"name: {name!r} must be a plain name") for name in ("a/b", "../x", "..", ".", "")),
])  # fmt: skip
def test_refused_folders(config: dict[str, str], sentence: str) -> None:
    make("mine/last.pt", "other/notes.txt", "file", "runs")
    assert refusal(RunConfig(**config)).startswith(sentence)
    if "is not empty; " in sentence or "plain name" in sentence:  # it is said before data are read and a model is built
        assert user_error(continues, RunConfig(**config)).startswith(sentence)


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
