"""A finished run that goes on: what it takes along, what is refused, and which weights it ends with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import qat
from qat.training.run import stages
from tests.loading.test_loading import loss_of, summary
from tests.runs.finished_runs import in_place
from tests.runs.tiny_training import Captured, Patch, curves


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
    rates = [value for _, value in curves(run)["qat/train/lr"]]
    assert len(rates) == 16  # 4 steps an epoch, one point each
    assert rates[8] == pytest.approx(0.025) and rates[7] < 0.002 and rates[15] < 0.001
    model: Any = qat.load(run, tiny())
    assert loss_of(model) == after["qat"]["loss"]


def test_an_interrupted_extension_is_not_finished_and_goes_on(
    place: Path, tiny: Callable[..., nn.Module], monkeypatch: Patch
) -> None:
    shutil.copytree(place, place.parent / "whole")
    run = place / "runs" / "own"
    assert go_on(place.parent / "whole", "qat.epochs=4") == 0
    real = stages.train_stage

    def stop(run: stages.StageRun, state: object = None) -> object:
        def set_epoch(number: int, first: int = 0) -> None:
            raise KeyboardInterrupt

        run.train.set_epoch = set_epoch  # type: ignore[method-assign]
        return real(run, state)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(stages, "train_stage", stop)
        assert go_on(place, "qat.epochs=4") == 130
    assert not (run / "summary.json").exists()
    with pytest.warns(UserWarning, match="the run is not finished; last.pt has the quantized model after epoch 2 of 2"):
        qat.load(run, tiny())
    assert go_on(place, "qat.epochs=4") == 0
    assert summary(run)["qat"] == summary(place.parent / "whole" / "runs" / "own")["qat"]


def test_a_failing_export_leaves_the_old_file_and_an_unfinished_run(place: Path, monkeypatch: Patch) -> None:
    run = place / "runs" / "own"
    make_the_first_epoch_best(run)
    before = (run / "model.onnx").read_bytes()

    def fails(model: object, path: Path, *_: object, **__: object) -> None:
        path.write_text("half of it")
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(qat, "export_onnx", fails)
        assert go_on(place, "export.weights=best") == 2
    assert (run / "model.onnx").read_bytes() == before and not (run / "summary.json").exists()
    assert go_on(place, "export.weights=best") == 0
    assert summary(run)["qat"]["weights"] == "best" and (run / "model.onnx").read_bytes() != before


def test_an_old_model_beside_new_weights_is_named(place: Path, capsys: Captured) -> None:
    run = place / "runs" / "own"
    before = (run / "model.onnx").read_bytes()
    assert go_on(place, "qat.epochs=3", "export.onnx=false") == 0
    warning = "model.onnx is of an earlier export: export.onnx is false"
    assert summary(run)["warnings"][-1] == warning and (run / "model.onnx").read_bytes() == before
    assert go_on(place, "qat.epochs=3") == 0
    assert warning not in summary(run)["warnings"] and summary(run)["onnx"]["agreement"] == 1
    assert "export: epoch 3 of 3 (last)\n" in capsys.readouterr().out


def test_another_place_of_the_data_and_another_way_to_compute_change_nothing(
    pets: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(pets, tmp_path / "x", ignore=shutil.ignore_patterns("best.pt"))
    (tmp_path / "x" / "images").rename(tmp_path / "x" / "moved")

    def again(*arguments: str) -> int:
        return in_place(tmp_path / "x", "--config", "pets.yaml", "run_dir=runs/pets", "resume=auto", *arguments)

    assert again("qat.epochs=3") == 2
    assert "'images/train' cannot be read" in (said := capsys.readouterr().err) and f"'{tmp_path}/x'" in said
    free = ["data.root=../x/moved", "data.eval_batch_size=3", "integer_forward=off", "channels_last=false"]
    assert again(*free, "qat.epochs=4") == 0
    found = summary(tmp_path / "x" / "runs" / "pets")
    assert found["qat"]["epoch"] == 4 and not [each for each in found["warnings"] if each.startswith("data:")]
    (tmp_path / "x" / "moved" / "train" / "cat" / "0.png").unlink()
    assert again(*free, "qat.epochs=5") == 0
    warnings = summary(tmp_path / "x" / "runs" / "pets")["warnings"]
    assert any("the train images are others than before (24 then, 23 now)" in each for each in warnings)


def test_a_run_needs_only_its_own_weights_to_go_on(tmp_path: Path, own: Path) -> None:
    shutil.copytree(own, tmp_path / "x", ignore=shutil.ignore_patterns("runs"))
    shutil.copy(own / "runs" / "own" / "float.safetensors", tmp_path / "x" / "w.safetensors")
    arguments = ["--config", "own.yaml", "model.checkpoint=w.safetensors", "float.epochs=0", "run_dir=x", "resume=auto"]
    assert in_place(tmp_path / "x", *arguments) == 0
    (tmp_path / "x" / "w.safetensors").unlink()
    assert in_place(tmp_path / "x", *arguments, "qat.epochs=3") == 0


def make_the_first_epoch_best(run: Path) -> float:
    """Let best.pt be another epoch than the last; return the weight that tells it."""
    payload = torch.load(run / "best.pt", weights_only=True)
    payload["epochs"] = 1
    payload["model"]["5.bias"][0] += 1000  # every image is a 0
    torch.save(payload, run / "best.pt")
    return float(payload["model"]["5.bias"][0])


def test_the_best_epoch_is_exported_and_reported_on_demand(
    place: Path, tiny: Callable[..., nn.Module], capsys: Captured
) -> None:
    run = place / "runs" / "own"
    last, bias = summary(run)["qat"], make_the_first_epoch_best(run)
    assert go_on(place, "export.weights=best") == 0
    found = summary(run)
    zeros = pytest.approx(found["qat"]["top1"])
    assert (found["qat"]["weights"], found["qat"]["epoch"], found["qat"]["epochs"]) == ("best", 1, 2)
    assert found["onnx"]["top1"] == zeros != last["top1"] and found["onnx"]["agreement"] == 1
    said = capsys.readouterr().out
    assert "QAT, best epoch (1 of 2)" in said and "going on" not in said
    assert "export: epoch 1 of 2 (best) replaces epoch 2 of 2 (last) in model.onnx" in said
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
