"""The command: the files of a run, its errors, and resuming."""

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qat
from qat.training import script as train
from qat.training.config.schema import RunConfig
from qat.training.run import stages
from qat.training.run.logging import RunLog
from qat.training.run.proof import export_and_prove
from tests.runs import small_run
from tests.runs.small_run import refusal, start, summary
from tests.runs.tiny_training import Captured, Patch, user_error

ROOT = Path(__file__).resolve().parents[2]
FILES = small_run.FILES


def times(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in run.iterdir()}


def test_a_run_leaves_everything(folder: Path, capsys: Captured) -> None:
    assert start("float_finetune=true", "qat.ema_decay=0.9") == 0
    run = folder / "runs" / "tiny"
    names = {path.name for path in run.iterdir()}
    expected = {"config.yaml", "last.pt", "best.pt", "float.safetensors", "model.onnx", "summary.json", "layers.txt"}
    assert names == expected | {"curves"}
    # Point 62: float.safetensors was for its owner alone.
    assert len({stat.S_IMODE((run / name).stat().st_mode) for name in expected}) == 1
    found = summary(run)
    assert found["onnx"]["top1"] == pytest.approx(found["qat"]["top1"], abs=1.01)
    assert found["onnx"]["agreement"] >= 0.995 and found["onnx"]["layers"]["largest_difference"] <= 1
    assert found["onnx"]["size_bytes"] == (run / "model.onnx").stat().st_size
    assert found["float"]["size_bytes"] == (run / "float.safetensors").stat().st_size
    assert (found["epochs"], found["seed"]) == (2, 0)
    assert {"top1"} <= set(found["calibrated"]) and {"top1"} <= set(found["float_finetune"])
    checkpoint = torch.load(run / "last.pt", weights_only=True)
    assert checkpoint["stage"] == "qat" and checkpoint["epochs"] == 2
    assert "16 bits" in (run / "layers.txt").read_text()
    printed = capsys.readouterr().out
    for row in ("float ", "float, fine-tuned as QAT", "calibrated (PTQ)", "QAT", "ONNX Runtime, integers"):
        assert row in printed
    # The resolved config repeats the run in the next folder, and the first one is not touched.
    before = times(run)
    assert train.main(["runs/tiny/config.yaml"]) == 0
    assert times(run) == before
    second = summary(folder / "runs" / "tiny-2")
    assert all(found[key] == second[key] for key in ("float", "calibrated", "qat"))
    capsys.readouterr()
    # A finished run has nothing to do, and other settings are refused.
    assert train.main(["runs/tiny/config.yaml", "resume=auto", "run_dir=runs/tiny"]) == 0
    assert capsys.readouterr().out.startswith("runs/tiny: this run is finished; ") and times(run) == before
    assert train.main(["runs/tiny/config.yaml", "resume=auto", "run_dir=runs/tiny", "seed=3"]) == 2
    assert "was trained with seed: 0, now it is 3" in capsys.readouterr().err and times(run) == before


@pytest.mark.parametrize(("arguments", "facts"), [
    (["quantization.weight.rule=lqs"], ("quantization.weight.rule: unknown quantizer 'lqs'", "'lsq'?")),
    (["quantization.overrides.conv9.skip=true"], ("the recipe's pattern 'conv9' names no layer", "0, 4, 8")),
    (["quantization.weight.bits=12"], ("'0.weight_quantizer'", "-2047 to 2047", "export.onnx=false")),
    (["model.name=tinymodels:wrapped"], ("tinymodels:wrapped: prepare: DataParallel wraps the model",)),
    (["quantization.activation.granularity=channel"], ("granularity 'channel' has no integer kernel",)),
])  # fmt: skip
def test_mistakes_are_one_sentence_and_status_2(
    folder: Path, capsys: Captured, arguments: list[str], facts: tuple[str, ...]
) -> None:
    said = refusal(capsys, *arguments)
    assert all(fact in said for fact in facts)


def test_a_failed_proof_is_status_1(folder: Path, monkeypatch: Patch, capsys: Captured) -> None:
    real = qat.export_onnx

    def exports_another(model: torch.fx.GraphModule, path: Path, images: torch.Tensor, **named: Any) -> None:
        with torch.no_grad():
            head = model.get_submodule("8")
            assert isinstance(head, nn.Linear)
            head.weight.neg_()
            real(model, path, images, **named)
            head.weight.neg_()

    monkeypatch.setattr(qat, "export_onnx", exports_another)
    assert start("run_dir=wrong") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "of its predictions are the torch model's, and near-ties of rounding do not explain the others" in said
    found = summary(folder / "wrong")
    assert said.endswith(found["problem"]) and found["onnx"]["differences"]["unexplained"] > 0
    assert start("run_dir=wrong", "resume=auto") == 1
    assert capsys.readouterr().err == f"wrong/model.onnx: {found['problem']}\n"


def test_an_error_of_the_exporter_is_a_sentence_and_leaves_no_file(tmp_path: Path, monkeypatch: Patch) -> None:
    def fails(model: torch.fx.GraphModule, path: Path, images: torch.Tensor, **named: Any) -> None:
        path.write_text("half of it")
        raise ValueError("no operator")

    monkeypatch.setattr(qat, "export_onnx", fails)
    model = torch.fx.symbolic_trace(nn.Identity())
    with RunLog(tmp_path) as log:
        said = user_error(export_and_prove, model, tmp_path / "model.onnx", torch.zeros(1), [], RunConfig(), {}, log)
    assert said.startswith("export: resnet18 could not be exported (ValueError: no operator); ")
    assert not list(tmp_path.glob("*model.onnx*"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_run_keeps_its_promises(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "--config", "resnet_int8.yaml"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    print(shown.stdout)
    assert shown.returncode == 0, shown.stderr
    found = summary(tmp_path / "runs" / "resnet_int8")
    assert found["float"]["top1"] > 97
    assert found["qat"]["top1"] >= found["float"]["top1"] - 0.5
    assert abs(found["onnx"]["top1"] - found["qat"]["top1"]) <= 0.2
    assert found["onnx"]["agreement"] >= 0.995
    assert found["onnx"]["size_bytes"] <= 0.27 * found["float"]["size_bytes"]
    layers, operators = found["onnx"]["layers"], found["onnx"]["operators"]
    assert layers["differing"] < layers["elements"] / 100_000 and layers["largest_difference"] <= 1
    assert operators["QLinearConv"] == 20 and operators["QLinearAdd"] == 8
    assert not {"Conv", "FusedConv", "Add", "Gemm", "MatMul"} & set(operators)


def test_a_second_run_in_the_same_folder_is_refused(folder: Path, monkeypatch: Patch, capsys: Captured) -> None:
    statuses: list[int] = []

    def starts_another(*_: object) -> None:
        for resume in ("auto", "never"):
            statuses.append(start("run_dir=one", f"resume={resume}", "seed=9"))
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "train_stage", starts_another)
    assert start("run_dir=one") == 130 and statuses == [2, 2]
    first, second, _ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{folder}/one: another run writes there; ")
    assert second == first
    assert "seed: 0" in (folder / "one" / "config.yaml").read_text()
    assert sorted(path.name for path in (folder / "one").iterdir() if path.name[:6] != "events") == ["config.yaml"]
