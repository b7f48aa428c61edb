"""A finished run that goes on: what it takes along, what is refused, and which weights it ends with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from tiny_training import curves
from torch import nn

import qat
import train
from tests.loading.conftest import in_place
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


def test_an_interrupted_extension_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place, place.parent / "whole")
    assert go_on(place.parent / "whole", "qat.epochs=4") == 0
    real = train.train_stage

    def stop(run: train.StageRun, state: object = None) -> object:
        def set_epoch(number: int) -> None:
            raise KeyboardInterrupt

        run.train.set_epoch = set_epoch  # type: ignore[method-assign]
        return real(run, state)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_stage", stop)
        assert go_on(place, "qat.epochs=4") == 130
    assert not (place / "runs" / "own" / "summary.json").exists()  # it is not finished
    assert go_on(place, "qat.epochs=4") == 0
    found, whole = summary(place / "runs" / "own"), summary(place.parent / "whole" / "runs" / "own")
    assert found["qat"] == whole["qat"]


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
    assert "QAT, best epoch (1 of 2)" in capsys.readouterr().out
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
