"""What is kept of finished runs, the tables that are made of it, and the trained models in benchmarks/models."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import qat
from benchmarks import accuracy_table
from benchmarks.accuracy import ACCURACY, LARGEST, MODELS, ROOT, last_training_loss
from benchmarks.cifar_resnet import resnet20
from benchmarks.kept import kept
from qat.training.config.file import load_config
from qat.training.loop.preparation import build_recipe
from tests.runs.finished_runs import own_fixture  # noqa: F401

NAMES = sorted(path.stem for path in MODELS.glob("*.onnx"))
CONFIG = "# A recipe.\n# Result: old.\n\nseed: 0  # Result: of a comment inside\n"


def test_the_training_loss_is_that_of_the_run(own: Path) -> None:
    found = last_training_loss(own / "runs" / "own", steps=4)
    assert 0 < found < 2 * math.log(10)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Two seeds of one row, and a network that trained in float first."""
    about = {"date": "2026-01-01", "commit": "abc", "machine": {"processor": "a CPU", "threads": 1}}
    row = {"row": "resnet20_cifar10_w2a2", "bits": 2, "what": "our recipe", "epochs": 6, "float": 91.5}
    row |= {"float_finetune": None, "calibrated": 10.0, "agreement": 0.999, "standard_error": 1.0, "train_loss": 0.25}
    row |= {"versions": {"torch": "2"}} | about
    found = [row | {"seed": n, "qat": q, "onnx": q, "difference": q - 91.5} for n, q in enumerate((89.0, 90.0))]
    found.append(found[0] | {"row": "other", "what": "MobileNetV2, our recipe", "own_float": True})
    monkeypatch.setattr(accuracy_table, "results", lambda: found)
    return found


def test_a_row_is_the_mean_of_its_seeds(results: list[dict]) -> None:
    table = accuracy_table.accuracy_table()
    (line,) = [line for line in table.splitlines() if line.startswith("| 2 | our recipe | 6")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    spread = "89.5 % (89.0 to 90.0)"
    assert cells[3:] == ["2", "10.0 % (10.0 to 10.0)", spread, spread, "99.9 % (99.9 to 99.9)", "-2.0 ± 1.0", "0.250"]
    assert "Float: 91.5 % as published." in table and "a CPU; last measured 2026-01-01 at abc" in table
    others = accuracy_table.accuracy_table(own_float=True)
    assert "MobileNetV2" not in table and "Float: MobileNetV2 91.5 %." in others and "as published" not in others


def test_a_config_says_what_its_row_gave(results: list[dict]) -> None:
    given = accuracy_table.with_result(CONFIG, "resnet20_cifar10_w2a2")
    said = "89.5 % (89.0 to 90.0) top-1 (91.5 % in float; 2 seeds), a CPU, 2026-01-01, commit abc"
    said = f"{said}; see docs/measurements.md."
    assert given == CONFIG.replace("old.", said)
    assert accuracy_table.with_result(CONFIG, "not_a_row") == CONFIG


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_have_the_results_that_are_kept(path: Path) -> None:
    assert accuracy_table.with_result(path.read_text(), path.stem) == path.read_text()


def test_each_model_has_its_weights_beside_it() -> None:
    assert NAMES
    assert sorted(path.stem for path in MODELS.glob("*.safetensors")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_its_accuracy_is_that_of_its_run(name: str) -> None:
    result = next(each for each in kept(ACCURACY) if (each["row"], each["seed"]) == (name, 0))
    with safe_open(MODELS / f"{name}.safetensors", "pt") as file:
        assert float(file.metadata()["top1"]) == pytest.approx(result["qat"])
    for suffix in (".onnx", ".safetensors"):
        assert (MODELS / f"{name}{suffix}").stat().st_size <= LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_answer_as_the_onnx_file(name: str) -> None:
    config = load_config(str(ROOT / "configs" / f"{name.removesuffix('_long')}.yaml"))
    images = torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = qat.prepare(resnet20(), build_recipe(config.quantization), images[:2])
    model.load_state_dict(load_file(MODELS / f"{name}.safetensors"))
    result = qat.verify_onnx(MODELS / f"{name}.onnx", model, [images])
    assert result.agreement == 1.0
    with torch.no_grad():
        answers = model.eval()(images)
    assert result.max_difference < 0.02 * float(answers.max() - answers.min())
