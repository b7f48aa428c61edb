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
from qat.training.model import build_recipe
from tests.runs.finished_runs import own_fixture  # noqa: F401

NAMES = sorted(path.stem for path in MODELS.glob("*.onnx"))


def test_the_training_loss_is_that_of_the_run(own: Path) -> None:
    found = last_training_loss(own / "runs" / "own", steps=4)
    assert 0 < found < 2 * math.log(10)


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
