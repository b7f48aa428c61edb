"""`python -m qat compare`, and what a dry run shows and leaves."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from qat.training import script
from tests.runs.tiny_training import Captured, Patch

Verb = Callable[..., tuple[int, str, str]]


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
