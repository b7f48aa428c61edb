"""Which folder a run uses, and that existing files are never touched."""

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_training import user_error

from qat.training.config.file import dump_config
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.run import folder as run_folder
from qat.training.run.checkpoint import save_checkpoint
from qat.training.run.folder import RunFolder, open_run_folder

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
    said = user_error(open_run_folder, config)
    assert {path: path.is_file() and path.read_text() for path in Path().rglob("*")} == before
    return said


def test_default_folders_are_numbered() -> None:
    paths = [open_run_folder(RunConfig(name="x")).path for _ in range(3)]
    assert paths == [Path(name).absolute() for name in ("runs/x", "runs/x-2", "runs/x-3")]
    assert all(path.is_dir() for path in paths)


@pytest.mark.parametrize(
    ("files", "config", "path", "checkpoint"),
    [
        # The next number follows the highest; other names do not count.
        (["runs/x/", "runs/x-7/", "runs/x-y/", "runs/x-08/", "runs/xx-30/"], {"name": "x"}, "runs/x-8", None),
        (
            ["runs/x/last.pt", "runs/x-2/last.pt", "runs/x-10/last.pt", "runs/x-11/config.yaml"],
            {"name": "x", "resume": "auto"},
            "runs/x-10",
            "runs/x-10/last.pt",
        ),
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
    ],
)
def test_which_folder_a_run_uses(files: list[str], config: Any, path: str, checkpoint: str | None) -> None:
    make(*files)
    with open_run_folder(RunConfig(**config)) as folder:
        assert folder == RunFolder(Path(path).absolute(), checkpoint and Path(checkpoint))
        assert Path(path).is_dir()


def test_a_folder_created_at_the_same_time_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    make("runs/x/", "runs/x-2/")
    monkeypatch.setattr("qat.training.run.folder._numbered_folders", lambda name: {})  # the view of the slower run
    assert open_run_folder(RunConfig(name="x")).path == Path("runs/x-3").absolute()


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


def test_a_finished_run_of_another_config_is_refused() -> None:
    finished(seed=3)
    assert refusal(RunConfig(name="x", resume="auto")) == (
        "runs/x/config.yaml: was trained with seed: 3, now it is 0; set it back, or start anew in another run_dir"
    )


def test_a_run_that_is_asked_for_more_is_not_finished() -> None:
    make("runs/x/last.pt")
    finished('{"exit_status": 0}', export={"onnx": False})
    with open_run_folder(RunConfig(name="x", resume="auto")) as folder:
        assert folder == RunFolder(Path("runs/x").absolute(), Path("runs/x/last.pt"))
    assert open_run_folder(RunConfig(name="x", resume="auto", export={"onnx": False})).finished == 0


@pytest.mark.parametrize("summary", ["", '{"onnx": {"top1"', "[]", "\0\0\0"])
def test_a_run_with_a_truncated_summary_repeats_its_end(summary: str) -> None:
    make("runs/x/last.pt")
    finished(summary)
    with open_run_folder(RunConfig(name="x", resume="auto")) as folder:
        assert folder == RunFolder(Path("runs/x").absolute(), Path("runs/x/last.pt"))


TRAINS, CALIBRATES = {"float": {"epochs": 1}}, {"qat": {"epochs": 0}}


@pytest.mark.parametrize(
    ("files", "before", "never", "auto"),
    [
        # What a start leaves that found a broken image, or was killed; with float.epochs: 0, float weights are a copy.
        ([], TRAINS, True, True),
        (["events.out.tfevents.1", "layers.txt", ".last.pt.tmp", ".lock", ".staged/model.onnx"], TRAINS, True, True),
        (["float.safetensors", "layers.txt"], {}, True, True),
        (["float.safetensors", "best.pt:1"], {}, True, True),  # no space for last.pt
        (["float.safetensors", "best.pt:0", "model.onnx"], CALIBRATES, True, True),
        (["float.safetensors", "best.pt:0", "model.onnx", "summary.json"], CALIBRATES, False, True),  # export again
        # Weights whose last.pt was removed, finished runs, and a user's own files stay.
        (["float.safetensors"], TRAINS, False, False),
        (["float.safetensors", "best.pt:2"], {}, False, False),
        (["model.onnx"], {}, False, False),
        (["events.out.tfevents.1", "notes.txt"], {}, False, False),
    ],
)
def test_a_start_is_repeated_where_nothing_was_trained(
    files: list[str], before: dict[str, Any], never: bool, auto: bool
) -> None:
    make("x/", *(f"x/{file.partition(':')[0]}" for file in files))
    Path("x/config.yaml").write_text(dump_config(RunConfig(**before)))
    for epochs in [int(file.partition(":")[2]) for file in files if ":" in file]:
        empty: dict[str, Any] = {"model": {}, "state": None, "results": {}, "config": {}}
        save_checkpoint(Path("x/best.pt"), {"stage": "qat", "epochs": epochs, **empty})
    for resume, allowed in (("never", never), ("auto", auto)):
        config = RunConfig(run_dir="x", resume=resume, **before)
        if not allowed:
            why = " and has no last.pt to go on from" if resume == "auto" else ""
            assert user_error(open_run_folder, config) == f"run_dir: 'x' is not empty{why}; choose another"
            continue
        with open_run_folder(config) as folder:
            assert folder == RunFolder(Path("x").absolute(), None)


def test_a_config_of_the_users_own_is_never_overwritten() -> None:
    make("x/")
    Path("x/config.yaml").write_text(f"# mine\n{dump_config(RunConfig())}")
    for resume in ("never", "auto"):
        assert refusal(RunConfig(run_dir="x", resume=resume)).startswith("run_dir: 'x' is not empty")
    make("x/events.out.tfevents.1")  # of an earlier version, whose config had fewer keys
    open_run_folder(RunConfig(run_dir="x")).__exit__(None, None, None)


def test_a_folder_has_one_run_at_a_time() -> None:
    make("runs/x/last.pt", "empty/")
    for path, config in (
        ("runs/x", RunConfig(name="x", resume="auto")),
        ("empty", RunConfig(run_dir="empty")),
        ("new", RunConfig(run_dir="new")),
    ):
        with open_run_folder(config):
            resuming = config.model_copy(update={"resume": "auto"})
            assert refusal(resuming).startswith(f"{Path(path).absolute()}: another run writes there; ")
        assert not Path(path, ".lock").exists()
        open_run_folder(resuming).__exit__(None, None, None)


def test_a_numbered_folder_that_another_run_locks_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_folder.RunLock

    def lock(path: Path) -> object:
        if path == Path("runs/x"):
            real(path)  # by run_dir=runs/x, in the moment between its creation and its lock
        return real(path)

    monkeypatch.setattr(run_folder, "RunLock", lock)
    with open_run_folder(RunConfig(name="x")) as folder:
        assert folder == RunFolder(Path("runs/x-2").absolute(), None)


def test_files_of_a_faster_run_are_seen_after_locking(monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_folder.RunLock

    def lock(path: Path) -> object:
        make("mine/config.yaml")  # another run began and ended between the check and the lock
        return real(path)

    monkeypatch.setattr(run_folder, "RunLock", lock)
    with pytest.raises(UserError, match=r"^run_dir: 'mine' is not empty; choose another$"):
        open_run_folder(RunConfig(run_dir="mine"))
    assert not Path("mine/.lock").exists()


@pytest.mark.parametrize(
    ("run_dir", "resume", "sentence"),
    [
        ("mine", "never", "run_dir: 'mine' is not empty; choose another, or set resume=auto to go on from its last.pt"),
        ("other", "never", "run_dir: 'other' is not empty; choose another"),
        ("other", "auto", "run_dir: 'other' is not empty and has no last.pt to go on from; choose another"),
        ("file", "auto", "run_dir: 'file' is not a folder; choose another"),
        ("file/x", "never", "run_dir: 'file/x': cannot use it (Not a directory); choose another"),
        ("l" * 300, "never", f"run_dir: '{'l' * 300}': cannot use it (File name too long); choose another"),
    ],
)
def test_refused_folders(run_dir: str, resume: str, sentence: str) -> None:
    make("mine/last.pt", "other/notes.txt", "file")
    assert refusal(RunConfig(run_dir=run_dir, resume=resume)) == sentence


@pytest.mark.parametrize("name", ["a/b", "../x", "..", ".", ""])
def test_a_name_with_slashes_is_refused(name: str) -> None:
    sentence = f"name: {name!r} must be a plain name without slashes; to choose a place set run_dir"
    assert refusal(RunConfig(name=name)) == sentence


def test_a_file_named_runs_is_refused() -> None:
    make("runs")
    assert refusal(RunConfig(name="x")) == "runs: cannot read the folder of runs (Not a directory); set run_dir"


def test_unwritable_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("runs/x/last.pt", "empty/")
    if os.geteuid() == 0:  # root may write anywhere: let the system say what it tells others
        monkeypatch.setattr("os.access", lambda path, mode: False)

        def refuse(path: Path, mode: int = 0o777, **_: bool) -> None:
            if not path.exists():
                raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        for name in ("runs/x", "runs", "empty", "."):
            (folder / name).chmod(0o555)
    try:
        unwritable = "this folder is not writable; choose another run_dir or change its permissions"
        assert refusal(RunConfig(run_dir="empty")) == f"empty: {unwritable}"
        assert refusal(RunConfig(name="x", resume="auto")) == f"runs/x: {unwritable}"
        assert refusal(RunConfig(name="x")) == "runs/x-2: cannot create the run folder (Permission denied); set run_dir"
        sentence = "run_dir: 'new': cannot use it (Permission denied); choose another"
        assert refusal(RunConfig(run_dir="new")) == sentence
    finally:
        for name in (".", "empty", "runs", "runs/x"):
            (folder / name).chmod(0o755)
