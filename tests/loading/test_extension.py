"""A finished run that goes on: what it takes along, what is refused, and which weights it ends with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from finished_runs import in_place
from tiny_training import curves
from torch import nn

import qat
from qat.training.run import stages
from qat.training.run.staging import READY, STAGED, result
from tests.loading.test_loading import loss_of, summary


@pytest.fixture
def place(own: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the run runs/own, which has 2 epochs."""
    shutil.copytree(own, tmp_path / "copy")
    return tmp_path / "copy"


def go_on(place: Path, *arguments: str) -> int:
    return in_place(place, "--config", "own.yaml", "run_dir=runs/own", "resume=auto", *arguments)


def test_the_rate_goes_to_the_longer_schedule(place: Path, tiny: Callable[..., nn.Module]) -> None:
    run = place / "runs" / "own"
    before = summary(run)
    assert go_on(place, "qat.epochs=4") == 0
    after = summary(run)
    assert after["float"] == before["float"] and after["calibrated"] == before["calibrated"]
    assert after["epochs"] == after["qat"]["epoch"] == 4
    rates = [value for _, value in curves(run)["qat/lr"]]
    assert len(rates) == 16  # 4 steps an epoch, one point each
    assert rates[8] == pytest.approx(0.025) and rates[7] < 0.002 and rates[15] < 0.001
    model: Any = qat.load(run, tiny())
    assert loss_of(model) == after["qat"]["loss"]


RESULTS = ("config.yaml", "layers.txt", "model.onnx", "summary.json")


def results(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in RESULTS}


def test_an_interrupted_extension_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place, place.parent / "whole")
    run, before = place / "runs" / "own", results(place / "runs" / "own")
    assert go_on(place.parent / "whole", "qat.epochs=4") == 0
    real = stages.train_stage

    def stop(run: stages.StageRun, state: object = None) -> object:
        def set_epoch(number: int) -> None:
            raise KeyboardInterrupt

        run.train.set_epoch = set_epoch  # type: ignore[method-assign]
        return real(run, state)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(stages, "train_stage", stop)
        assert go_on(place, "qat.epochs=4") == 130
    assert results(run) == before
    assert go_on(place, "qat.epochs=4") == 0
    found, whole = summary(run), summary(place.parent / "whole" / "runs" / "own")
    assert found["qat"] == whole["qat"]


class Killed(BaseException):
    """The end of the process."""


@pytest.mark.parametrize("moved", range(len(RESULTS) + 1))
def test_a_kill_while_the_results_change_leaves_all_of_them(
    place: Path, monkeypatch: pytest.MonkeyPatch, moved: int, tiny: Callable[..., nn.Module]
) -> None:
    run = place / "runs" / "own"
    bias, before = make_the_first_epoch_best(run), results(run)
    real, left = Path.replace, [moved]

    def replace(path: Path, target: Path) -> Path:
        if path.parent.name == READY:
            if not left[0]:
                raise Killed
            left[0] -= 1
        return real(path, target)

    def rmdir(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr(Path, "rmdir", rmdir)
        assert go_on(place, "export.weights=best") == 70
    assert (run / READY).is_dir() and summary(run)["qat"]["weights"] == ("best" if moved == len(RESULTS) else "last")
    assert float(qat.load(run, tiny()).state_dict()["5.bias"][0]) == bias  # as READY says
    whole = {name: result(run, name).read_bytes() for name in RESULTS}
    assert whole.keys() == before.keys() and all(
        whole[name] != before[name] for name in RESULTS if name != "layers.txt"
    )
    assert go_on(place, "export.weights=best") == 0
    assert results(run) == whole and not [path for path in run.iterdir() if path.name[0] == "."]


def test_a_failing_export_leaves_the_results(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "runs" / "own"
    make_the_first_epoch_best(run)
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.name[:6] != "events"}

    def fails(*_: object, **__: object) -> None:
        (run / STAGED / "model.onnx").write_text("half of it")
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(qat, "export_onnx", fails)
        assert go_on(place, "export.weights=best") == 2
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.name[:6] != "events"} == before
    (run / STAGED).mkdir()  # of a run that was killed
    (run / STAGED / "model.onnx").write_text("half of it")
    assert go_on(place, "export.weights=best") == 0
    assert not (run / STAGED).exists() and summary(run)["qat"]["weights"] == "best"
    capsys.readouterr()


def test_an_old_model_beside_new_weights_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "runs" / "own"
    before = (run / "model.onnx").read_bytes()
    assert go_on(place, "qat.epochs=3", "export.onnx=false") == 0
    warning = "model.onnx is of an earlier export, not of these weights: export.onnx is false"
    assert summary(run)["warnings"][-1] == warning and (run / "model.onnx").read_bytes() == before
    assert go_on(place, "qat.epochs=3") == 0
    assert warning not in summary(run)["warnings"] and summary(run)["onnx"]["agreement"] == 1
    assert "export: epoch 3 of 3 (last)\n" in capsys.readouterr().out


def test_another_place_of_the_data_and_another_way_to_compute_change_nothing(
    pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pets, tmp_path / "x", ignore=shutil.ignore_patterns("best.pt"))
    (tmp_path / "x" / "images").rename(tmp_path / "x" / "moved")

    def again(*arguments: str) -> int:
        return in_place(tmp_path / "x", "--config", "pets.yaml", "run_dir=runs/pets", "resume=auto", *arguments)

    assert again("qat.epochs=3") == 2
    assert capsys.readouterr().err.startswith(f"data.root: 'images' is not a folder (looked in '{tmp_path}/x'); ")
    free = ["data.root=../x/moved", "data.eval_batch_size=3", "integer_forward=off", "channels_last=false"]
    assert again(*free, "qat.epochs=4") == 0
    found = summary(tmp_path / "x" / "runs" / "pets")
    assert found["qat"]["epoch"] == 4 and not [each for each in found["warnings"] if each.startswith("data:")]
    (tmp_path / "x" / "moved" / "train" / "cat" / "0.png").unlink()
    assert again(*free, "qat.epochs=5") == 0
    said = "data: the train images are others than before (24 then, 23 now); accuracies before and after do not compare"
    assert said in summary(tmp_path / "x" / "runs" / "pets")["warnings"]
    for split in ("train", "val"):
        (tmp_path / "x" / "moved" / split / "dog").rename(tmp_path / "x" / "moved" / split / "wolf")
    capsys.readouterr()
    assert again(*free, "qat.epochs=6") == 2
    assert capsys.readouterr().err.strip() == (
        "data: 3 classes, the run was trained with 3: without dog and with wolf; set data.root to its images, or start"
        " anew in another run_dir"
    )


def test_a_run_needs_only_its_own_weights_to_go_on(tmp_path: Path, own: Path) -> None:
    shutil.copytree(own, tmp_path / "x", ignore=shutil.ignore_patterns("runs"))
    shutil.copy(own / "runs" / "own" / "float.safetensors", tmp_path / "x" / "w.safetensors")
    arguments = ["--config", "own.yaml", "model.checkpoint=w.safetensors", "float.epochs=0", "run_dir=x", "resume=auto"]
    assert in_place(tmp_path / "x", *arguments) == 0
    (tmp_path / "x" / "w.safetensors").unlink()
    assert in_place(tmp_path / "x", *arguments, "qat.epochs=3") == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["qat.epochs=1"],
            "runs/own/config.yaml: qat.epochs: 1 is fewer than the 2 that it was trained with, and a run can only grow;"
            " set it back, or start anew in another run_dir",
        ),
        (
            ["qat.epochs=4", "qat.lr=0.1"],
            "runs/own/config.yaml: was trained with qat.lr: 0.05, now it is 0.1; set it back, or start anew in another"
            " run_dir",
        ),
    ],
)
def test_other_changes_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    files = {path.name: path.read_bytes() for path in (place / "runs" / "own").iterdir()}
    assert go_on(place, *arguments) == 2
    assert capsys.readouterr().err.strip() == sentence
    assert {path.name: path.read_bytes() for path in (place / "runs" / "own").iterdir()} == files


def make_the_first_epoch_best(run: Path) -> float:
    """Let best.pt be another epoch than the last; return the weight that tells it."""
    payload = torch.load(run / "best.pt", weights_only=True)
    payload["epochs"] = 1
    payload["model"]["5.bias"][0] += 1000  # every image is a 0
    torch.save(payload, run / "best.pt")
    return float(payload["model"]["5.bias"][0])


def test_the_best_epoch_is_exported_and_reported_on_demand(
    place: Path, tiny: Callable[..., nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "runs" / "own"
    last, bias = summary(run)["qat"], make_the_first_epoch_best(run)
    assert go_on(place, "export.weights=best") == 0
    found = summary(run)
    zeros = pytest.approx(found["qat"]["top1"])
    assert (found["qat"]["weights"], found["qat"]["epoch"], found["qat"]["epochs"]) == ("best", 1, 2)
    assert found["onnx"]["top1"] == zeros != last["top1"] and found["onnx"]["agreement"] == 1
    said = capsys.readouterr().out
    assert "QAT, best epoch (1 of 2)" in said and "going on" not in said and "scales learn" not in said
    replaced = "epoch 1 of 2 (best) replaces epoch 2 of 2 (last) in model.onnx; export.weights=last brings that back\n"
    assert "qat: all 2 epochs are trained; evaluating the last one\n" in said and f"\nexport: {replaced}" in said
    metadata = {each.key: json.loads(each.value) for each in onnx.load(run / "model.onnx").metadata_props}
    assert (metadata["weights"], metadata["epoch"], metadata["accuracy"]["qat"]) == ("best", 1, zeros)
    model: Any = qat.load(run, tiny())
    assert float(model.state_dict()["5.bias"][0]) == bias
    # And back to the last one.
    assert go_on(place) == 0
    assert summary(run)["qat"] == last and last["weights"] == "last"
    assert float(qat.load(run, tiny()).state_dict()["5.bias"][0]) != bias
    assert go_on(place, "export.onnx=false") == 0
    assert "this run is finished" in capsys.readouterr().out
    (run / "best.pt").unlink()
    assert go_on(place, "export.weights=best") == 2
    assert capsys.readouterr().err.strip() == (
        f"export.weights: 'best' needs {run}/best.pt, which is missing; set export.weights=last"
    )


def test_a_better_epoch_than_the_last_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "runs" / "own"
    payload = torch.load(run / "last.pt", weights_only=True)
    payload["state"]["best_top1"] = 99.5
    torch.save(payload, run / "last.pt")
    (run / "summary.json").unlink()
    assert go_on(place, "export.onnx=false") == 0
    assert (
        f"qat: the best epoch, in best.pt, had val top1 99.50 %, the last {payload['evaluation']['top1']:.2f} %;"
        " with resume=auto, export.weights=best takes that one\n"
    ) in capsys.readouterr().out


def test_a_run_of_an_earlier_version_goes_on(place: Path) -> None:
    run = place / "runs" / "own"
    lines = (run / "config.yaml").read_text().splitlines()
    kept = [line for line in lines if line.strip() not in ("weights: last", "bn_reestimate: auto")]
    assert len(kept) == len(lines) - 2
    (run / "config.yaml").write_text("\n".join(kept))
    payload = torch.load(run / "last.pt", weights_only=True)
    for key in ("about", "evaluation", "statistics"):
        del payload[key]
    del payload["config"]["export"]["weights"], payload["config"]["float"]["bn_reestimate"]
    torch.save(payload, run / "last.pt")
    assert go_on(place, "qat.epochs=3") == 0
    assert summary(run)["qat"]["epoch"] == 3
