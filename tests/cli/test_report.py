"""What a run shows: its page, TensorBoard's pages, `report` and `compare`; and a dry run, which leaves nothing."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

import qat
from qat.cli.runs import in_torch, open_run
from qat.quantizer import Quantizer
from qat.training import script
from qat.training.report.figures import FIGURES
from tests.cli.conftest import Verb
from tests.runs.tiny_training import Captured, Patch, curves

MEASURED = {"sensitivity", "oscillation", "classes", "pictures"}
"""Figures that a run may lack: of a verb, of weights for too short a time, and of masks and boxes."""


def test_a_run_ends_with_its_report_and_its_pictures(pets: Path) -> None:
    run = pets / "runs" / "pets"
    text = (run / "report.html").read_text()
    for name in FIGURES.keys() - MEASURED:
        assert f'<section id="{name}"' in text
        picture = run / "results.png" if name == "results" else run / "figures" / f"{name}.png"
        with Image.open(picture) as image:
            assert np.asarray(image.convert("L")).std() > 5  # something is drawn
    found = json.loads((run / "analysis.json").read_text())
    model = qat.load(run)
    assert set(found["order"]) == {name for name, each in model.named_modules() if isinstance(each, Quantizer)}
    assert found["answers"]["answers"] == 12


def test_the_answers_that_changed_are_those_of_the_two_models(pets: Path) -> None:
    opened = open_run(str(pets / "runs" / "pets"))
    data = opened.data([f"data.root={pets / 'images'}"])
    changes: dict[tuple[int, ...], int] = {}
    for images, labels in data.val:
        answers = [in_torch(model, images).argmax(1) for model in (opened.float_model, opened.quantized)]
        for row in torch.stack((labels, *answers), 1).tolist():
            if row[1] != row[2]:
                changes[tuple(row)] = changes.get(tuple(row), 0) + 1
    found = json.loads((opened.path / "analysis.json").read_text())["answers"]
    assert {tuple(classes): number for *classes, number in found["changes"]} == changes


def test_every_quantizer_has_its_curves_from_calibration_to_the_end(pets: Path) -> None:
    run = pets / "runs" / "pets"
    drawn = curves(run)
    steps = [step for step, _ in drawn["qat/val/loss"]]
    assert steps[0] == drawn["float/val/loss"][-1][0] and len(steps) == 4  # calibrated, and three epochs
    for name, each in qat.load(run).named_modules():
        if isinstance(each, Quantizer):
            for kind in ("sqnr", "levels", "clipped_low", "clipped_high"):
                assert [step for step, _ in drawn[f"qat/train/quantizer_{kind}/{name}"]] == steps
            assert len(drawn[f"qat/train/quantizer_scale/{name}"]) == len(drawn[f"qat/train/quantizer_gradient/{name}"])
            assert f"qat/train/quantizer_at_floor/{name}" not in drawn  # none has rested there
    for tag in ("loss", "top1", "lr", "images_per_second", "data_wait", "memory_mb"):
        assert f"float/train/{tag}" in drawn and f"qat/train/{tag}" in drawn


def test_tensorboard_has_groups_pictures_text_and_a_row(pets: Path) -> None:
    events = EventAccumulator(str(pets / "runs" / "pets" / "curves")).Reload()
    tags = events.Tags()
    assert {"results", "errors", "scales"} <= set(tags["images"])
    shown = Image.open(io.BytesIO(events.Images("errors")[0].encoded_image_string))
    assert shown.width > 500
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {category.title: [chart.title for chart in category.chart] for category in layout.category}
    assert charts["training"][:2] == ["loss", "top1"] and "scale: features" in str(charts["scales, 1 at the start"])
    assert b"batch_size: 8" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    start = plugin_data_pb2.HParamsPluginData.FromString(
        events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info.hparams
    assert start["qat.epochs"].number_value == 3 and start["model.name"].string_value == "squeezenet1_1"
    assert events.Scalars("final/onnx_top1")


def test_the_verb_draws_one_run_or_several(pets: Path, own: Path, verb: Verb, tmp_path: Path) -> None:
    run = tmp_path / "again"
    shutil.copytree(pets / "runs" / "pets", run)
    for name in ("report.html", "results.png"):
        (run / name).unlink()
    shutil.rmtree(run / "figures")
    assert verb("report", str(run)) == (0, f"{run / 'report.html'}\n", "")
    assert (run / "results.png").is_file() and (run / "figures").is_dir()
    other = own / "runs" / "own"
    before = {path: path.stat().st_mtime_ns for path in other.rglob("*")}
    assert verb("report", str(run), str(other), "--to", str(tmp_path / "both.html"))[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in other.rglob("*")}
    assert verb("report", str(run), "--to", "no/both.html")[2].startswith("--to: 'no/both.html': there is no folder")


def test_runs_stand_beside_each_other(pets: Path, own: Path, verb: Verb) -> None:
    summaries = [json.loads((path / "summary.json").read_text()) for path in (pets / "runs/pets", own / "runs/own")]
    status, out, err = verb("compare", "runs/pets", str(own / "runs" / "own"))
    rows = {line[: line.index("  ")]: line.split()[-2:] for line in out.splitlines()[2:]}
    assert status == 0 and rows["model.name"] == ["squeezenet1_1", "tinymodels:tiny"], err
    assert rows["qat.epochs"] == ["3", "2"] and rows["qat.ema_decay"] == ["-", "0.9"]
    assert rows["top1 % QAT"] == [str(round(each["qat"]["top1"], 2)) for each in summaries]
    assert "run_dir" not in rows and "seed" not in rows and "torch" not in rows
    status, out, _ = verb("compare", "runs/pets", str(own / "runs" / "own"), "--json")
    found = json.loads(out)
    assert found["config"]["qat.epochs"] == [3, 2] and found["unfinished"] == [] and found["versions"] == {}
    assert found["results"]["integers that differ"] == [each["onnx"]["layers"]["differing"] for each in summaries]


def test_an_unfinished_run_is_named_and_versions_that_differ_are_shown(pets: Path, verb: Verb, tmp_path: Path) -> None:
    for name in ("old", "begun"):
        shutil.copytree(pets / "runs" / "pets", tmp_path / name)
    (tmp_path / "begun" / "summary.json").unlink()
    summary = json.loads((tmp_path / "old" / "summary.json").read_text())
    summary["versions"]["torch"] = "2.0.0"
    (tmp_path / "old" / "summary.json").write_text(json.dumps(summary))
    status, out, err = verb("compare", "old", "begun", str(pets / "runs" / "pets"), place=tmp_path)
    assert status == 0 and "begun: not finished; train.py finishes it with resume=auto" in out.splitlines(), err
    assert "the configs are equal" in out
    [torch_row] = [line for line in out.splitlines() if line.startswith("torch ")]
    assert torch_row.split()[1:3] == ["2.0.0", "-"]


def test_a_dry_run_shows_cost_and_time_and_leaves_nothing(
    pets: Path, verb: Verb, capsys: Captured, monkeypatch: Patch
) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in pets.rglob("*")}

    before = files()
    more = ("qat.accumulate=2", "qat.progressive=[{bits: 6, epochs: 1}]", "qat.distillation={}", "float_finetune=true")
    status, out, err = verb("train", "--dry-run", "pets.yaml", "run_dir=runs/new", *more)
    assert status == 0 and "features.0" in out, err
    for said in ("weight bits", "one image: ", "MB at their bits", "\nfloat: ", "\nqat: 4 epochs", "\nabout "):
        assert said in out
    monkeypatch.chdir(pets)
    assert script.main(["--config", "pets.yaml", "--dry-run", "run_dir=runs/pets"]) == 0
    assert "\nabout " in capsys.readouterr().out
    assert files() == before
