"""`quantization.calibration_steps` of train.py: what it does, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from qat.training.config.file import load_config
from qat.training.errors import UserError
from tests.runs.finished_runs import SIZES, in_place, write_own

FEW = ("quantization.weight.bits=2", "quantization.residual_bits=8", "qat.ema_decay=null", "qat.bn_reestimate=auto")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_own(tmp_path_factory.mktemp("steps"))


def test_a_run_takes_its_steps_and_exports_what_they_made(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for name, steps in (
        ("plain", "[]"),
        ("steps", "[{name: cross_layer_equalization}, {name: brecq, iterations: 200}]"),
    ):
        given = (f"quantization.calibration_steps={steps}", f"run_dir={name}")
        assert in_place(place, "--config", "own.yaml", *SIZES, *FEW, *given) == 0
        found[name] = json.loads((place / name / "summary.json").read_text())
    assert found["steps"]["calibrated"]["top1"] > found["plain"]["calibrated"]["top1"]
    assert found["steps"]["qat"]["top1"] == found["steps"]["calibrated"]["top1"]
    said = [message for message in caplog.messages if message.startswith("calibrate: ")]
    assert [each.split(":")[1].strip() for each in said] == ["CrossLayerEqualization", "BRECQ"]
    weights = [torch.load(place / name / "best.pt", weights_only=True)["model"]["0.weight"] for name in found]
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("{name: adaround, rounds: 3}", "adaround: unknown argument 'rounds'; valid: iterations"),
        ("{name: ada}", "calibration_steps"),
        ("{name: qdrop, drop: 2}", "calibration_steps"),
    ],
)
def test_what_a_step_does_not_take_is_a_sentence(place: Path, step: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(str(place / "own.yaml"), [f"quantization.calibration_steps=[{step}]"])
