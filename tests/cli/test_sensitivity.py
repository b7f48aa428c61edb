"""`python -m qat sensitivity`: what it measures, writes, draws and suggests."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import qat
from qat.cli.sensitivity import suggested
from qat.training.config.schema import RunConfig
from qat.training.report import figures
from qat.training.report.findings import ReportedRun
from tests.cli.conftest import Verb
from tests.references.prepared_case import Plain
from tests.runs.finished_runs import PLAIN, SIZES, in_place, write_own


def test_it_measures_what_the_run_did(pets: Path, verb: Verb) -> None:
    summary = json.loads((pets / "runs" / "pets" / "summary.json").read_text())
    status, out, err = verb("sensitivity", "runs/pets")
    assert (status, err) == (0, "")
    result = json.loads((pets / "runs" / "pets" / "sensitivity.json").read_text())
    assert result["images"] == 12 and result["baseline"]["top1"] == summary["calibrated"]["top1"]
    assert result["float"]["top1"] == summary["float"]["top1"]
    names = [row["name"] for row in result["layers"]]
    assert names[0] == "features.0" and {line.split()[0] for line in out.splitlines()[2 : 2 + len(names)]} == {*names}
    assert set(result["layers"][0]["only"]) == set(result["layers"][0]["all_but"]) == {"weight", "activation", "both"}
    status, out, err = verb("sensitivity", "runs/pets", "--trained", "--images", "99")
    result = json.loads((pets / "runs" / "pets" / "sensitivity.json").read_text())
    assert status == 0 and result["weights"] == "trained" and "trained: top1 " in out, err
    assert result["baseline"]["top1"] == summary["qat"]["top1"]


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibrated run whose first layer is bad on purpose."""
    place = write_own(tmp_path_factory.mktemp("low"))
    overrides = 'quantization.overrides={"0": {weight: {bits: 2}, activation: {bits: 2}}}'
    assert in_place(place, "--config", "own.yaml", *SIZES, "run_dir=low", overrides, *PLAIN) == 0
    return place


def test_the_bad_layer_is_first_and_the_suggestion_can_be_pasted(low: Path, verb: Verb) -> None:
    status, out, err = verb("sensitivity", "low", "--model", "tinymodels:tiny", place=low)
    assert status == 0, err
    assert out.splitlines()[2].split()[0] == "0"
    text = out[out.index("quantization:") :]
    config = RunConfig.model_validate(yaml.safe_load(text)).quantization
    assert config.overrides["0"].weight.bits == config.overrides["0"].activation.bits == 8
    assert list(config.overrides) == ["0"]
    status, _, err = verb("sensitivity", "low", "--model", "tinymodels:tiny", "--images", "20", place=low)
    assert status == 0 and json.loads((low / "low" / "sensitivity.json").read_text())["images"] == 20, err


def score(loss: float, noise: float = 0.01) -> dict[str, float]:
    return {"top1": 90 - 10 * loss, "loss": loss, "noise_to_float": noise, "noise_to_baseline": noise}


def result_of(model: nn.Module, costs: dict[str, float], part: str = "weight", noise: float = 0.01) -> dict[str, Any]:
    """A measurement in which some layers cost as much as said, by one part."""
    whole = sum(costs.values())
    rows = []
    for row in qat.sensitivity(model, lambda model: 0.0)["layers"]:
        cost = costs.get(row["name"], 0.0)
        parts = {each: cost if each in (part, "both") else 0.0 for each in row["only"]}
        only = {each: score(value, noise) for each, value in parts.items()}
        rows.append({**row, "only": only, "all_but": {key: score(whole - each, noise) for key, each in parts.items()}})
    return {"images": 100, "baseline": score(whole, noise), "float": score(0.0, noise), "layers": rows}


def test_suggestions_go_by_noise_bits_and_rules() -> None:
    layers = {name: nn.Linear(8, 8) for name in ("one", "two", "three")}
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = Plain(lambda self, x: self.encoder(self.three(self.two(self.one(x)) + x)), **layers, encoder=encoder)
    overrides = {"one": {"weight": {"bits": 8}}, "three": {"weight": {"rule": "ternary", "bits": 2}}}
    recipe = qat.QuantRecipe(weight={"bits": 4}, overrides=overrides, residual_bits=4)
    model = qat.prepare(net, recipe, torch.randn(2, 5, 8))
    found = suggested(result_of(model, {"one": 0.4, "two": 0.3, "three": 0.2, "encoder.linear1": 0.01}), model)
    assert found == {
        "one": {"skip": True},
        "two": {"weight": {"bits": 8}},
        "three": {"weight": {"bits": 8, "rule": "lsq"}},
    }
    assert suggested(result_of(model, {"one": 0.4, "two": 0.3}, noise=0.5), model) == {}
    assert suggested(result_of(model, {"two": -0.3}), model) == {}
    assert suggested(result_of(model, {"two_quantizer": 0.3}, part="activation"), model) == {}
    every = {row["name"]: 0.2 for row in qat.sensitivity(model, lambda model: 0.0)["layers"][:9]}
    assert 0 < len(suggested(result_of(model, every), model)) <= 5


def test_a_product_in_a_layer_has_no_key_and_gets_no_suggestion() -> None:
    layers = {"rnn": nn.LSTM(4, 3, batch_first=True), "fc": nn.Linear(3, 2)}
    net = Plain(lambda self, x: self.fc(self.rnn(x)[0][:, -1]), **layers)
    model = qat.prepare(net, qat.QuantRecipe(weight={"bits": 4}), torch.randn(2, 5, 4))
    found = suggested(result_of(model, {"rnn.product_ih_l0": 0.3, "fc": 0.2}), model)
    assert found == {"fc": {"weight": {"bits": 8}}}


def test_the_figure_has_a_bar_for_each_part_of_each_layer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = qat.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), example_inputs=torch.randn(2, 4))
    (tmp_path / "sensitivity.json").write_text(json.dumps(result_of(model, {"1": 0.5})))
    [axes] = figures.sensitivity(ReportedRun(tmp_path)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [round(bar.get_width(), 6) for bars in axes.containers for bar in bars] == [0, 0.5, 0, 0]


def test_a_folder_that_cannot_be_written_is_a_sentence(pets: Path, verb: Verb, tmp_path: Path) -> None:
    shutil.copytree(pets / "runs" / "pets", tmp_path / "run")
    (tmp_path / "run" / "sensitivity.json").unlink(missing_ok=True)
    (tmp_path / "run" / "sensitivity.json").mkdir()
    status, out, err = verb("sensitivity", str(tmp_path / "run"), "--images", "5")
    assert status == 2 and "features.0" in out and "sensitivity.json: cannot write it" in err
