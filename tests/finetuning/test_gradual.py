"""Quantization by degrees: what is on at which progress, formula and gradient of a part, and a run's evaluations."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.finetuning import GradualQuantization
from qat.quantizer import Quantizer
from qat.training.config.stages import QATStageConfig
from qat.training.loop import engine
from qat.training.run.checkpoint import load_checkpoint
from tests.runs.tiny_training import TinyBatches, stage_run, train


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 3, 6, 6)


@pytest.fixture
def model(images: Tensor) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    few = qat.QuantSpec(bits=3)
    prepared = qat.prepare(layers, qat.QuantRecipe(weight=few, activation=few), images)
    qat.calibrate(prepared, [images])
    return prepared.train()


def off(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, Quantizer) and each.is_disabled}


ACTIVATIONS = {"input_quantizer", "0_quantizer", "2_quantizer"}


def test_activations_are_in_float_until_their_time_and_in_evaluations_they_are_not(
    model: Any, images: Tensor, tmp_path: Path
) -> None:
    whole = model(images)
    with qat.disable_fake_quant(model, weights=False):
        weights_only = model(images)
    gradual = GradualQuantization(model, activations_from=0.25)
    for progress in (0.0, 0.24, 0.25, 1.0, 0.1):
        gradual.set_progress(progress)
        assert off(model) == (ACTIVATIONS if progress < 0.25 else set())
        assert torch.equal(model(images), weights_only if progress < 0.25 else whole)
    with pytest.raises(ValueError, match="switched off"):
        qat.export_onnx(model.eval(), tmp_path / "early.onnx", images)
    gradual.complete()
    assert off(model) == set() and torch.equal(model.train()(images), whole)
    qat.export_onnx(model.eval(), tmp_path / "whole.onnx", images)


def test_what_was_switched_off_before_stays_off(model: Any) -> None:
    qat.disable_fake_quant(model, "2", weights=False)
    gradual = GradualQuantization(model, activations_from=0.5)
    gradual.set_progress(0.0)
    assert off(model) == ACTIVATIONS
    gradual.complete()
    assert off(model) == {"0_quantizer"}


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.3), (0.2, 0.65), (0.4, 1.0), (1.0, 1.0)])
def test_a_share_of_each_weight_is_quantized_and_the_rest_passes(model: Any, progress: float, share: float) -> None:
    """In 40,000 elements of a layer; the gradient of a part in float is 1 even where the grid clips."""
    layer = qat.QuantLinear(200, 200, weight_spec=qat.QuantSpec(bits=2), activation_spec=None).train()
    layer.weight_quantizer.scale.data *= 0.25
    gradual = GradualQuantization(layer, weight_share=0.3, weights_from=0.4)
    quantized = layer.quantized(layer.weight).detach()
    gradual.set_progress(progress)
    assert gradual.share == pytest.approx(share)
    drawn = [layer.quantized(layer.weight) for _ in range(2)]
    (gradient,) = torch.autograd.grad(drawn[0].sum(), layer.weight)
    in_float = drawn[0] == layer.weight
    assert torch.equal(drawn[0], torch.where(in_float, layer.weight, quantized))
    assert float(in_float.float().mean()) == pytest.approx(1 - share, abs=0.01)
    assert torch.equal(drawn[0], drawn[1]) == (share == 1)  # anew in every step
    assert bool((gradient[in_float] == 1).all())
    clipped = layer.weight.abs() > 2 * layer.weight_quantizer.scale
    assert bool((gradient[clipped & ~in_float] == 0).all()) and int((clipped & ~in_float).sum()) > 100


def test_parts_are_drawn_by_torchs_generator_and_evaluation_is_whole(model: Any, images: Tensor) -> None:
    evaluated = model.eval()(images)
    plain = model.train()(images)
    gradual = GradualQuantization(model, weight_share=0.5)
    gradual.set_progress(0.1)
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(model(images))
    assert torch.equal(answers[0], answers[1]) and not torch.equal(answers[0], answers[2])
    assert torch.equal(model.eval()(images), evaluated)
    before = torch.get_rng_state()
    gradual.complete()
    assert torch.equal(model.train()(images), plain)
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn any more


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_is_made_meanwhile_is_whole(copied: Callable[[Any], Any], model: Any, images: Tensor) -> None:
    plain = model.train()(images)
    gradual = GradualQuantization(model, weight_share=0.5)
    gradual.set_progress(0.1)
    other = copied(model)
    assert not torch.equal(model(images), plain) and torch.equal(other.train()(images), plain)
    assert not any(module._forward_hooks for module in other.modules())
    kept = [each for each in model.modules() if each._forward_hooks]
    gradual.complete()
    assert kept and not any(each._forward_hooks for each in kept)


def test_the_kernels_come_back_once_all_is_quantized(model: Any, images: Tensor) -> None:
    gradual = GradualQuantization(model, activations_from=0.5, weight_share=0.5)
    before = str(qat.explain(model))
    gradual.set_progress(0.0)
    assert "a hook waits for its call" in str(qat.explain(model)) and str(qat.explain(model)) != before
    gradual.complete()
    model(images)
    assert str(qat.explain(model)) == before


LAYER, IN_FLOAT = qat.QuantLinear(2, 2), qat.QuantLinear(2, 2, activation_spec=None)
REFUSED: list[tuple[Any, dict[str, float], str]] = [
    (LAYER, {"activations_from": 1.0}, "activations_from must be from 0 to below 1, got 1.0"),
    (LAYER, {"weights_from": 0.2}, "nothing is gradual; set activations_from or weight_share"),
    (nn.Linear(2, 2), {"weight_share": 0.5}, "the model has no quantizer of weights; call qat.prepare"),
    (IN_FLOAT, {"activations_from": 0.5}, "the model has no quantizer of activations; call qat.prepare"),
    (3, {"weight_share": 0.5}, "model must be a torch.nn.Module, got int"),
    (LAYER, {"weight_share": 0.5}, "progress must be from 0 to 1, got 1.5"),
]


@pytest.mark.parametrize(("model", "given", "fact"), REFUSED)
def test_what_is_not_gradual_is_refused(model: Any, given: dict[str, float], fact: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'GradualQuantization: {fact}')}"):
        GradualQuantization(model, **given).set_progress(1.5)


def test_a_stage_evaluates_and_saves_the_whole_model_after_every_epoch(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step, real_validate, seen = engine.Training.step, engine._validate, list[Any]()

    def note(what: str) -> None:
        seen.append((what, len(off(model)), sum(len(each._forward_hooks) for each in model.modules())))

    monkeypatch.setattr(engine.Training, "step", lambda *given, **named: (note("step"), real_step(*given, **named))[1])
    monkeypatch.setattr(engine, "_validate", lambda *given: (note("validation"), real_validate(*given))[1])
    block = {"activations_from": 0.5, "weight_share": 0.5, "weights_from": 0.8}
    batches = TinyBatches(12)
    batches.images = batches.images[:, :, :6, :6]
    named = {
        "train": batches,
        "val": batches,
        "config": {"watch": "scales"},
    }  # else evaluations have hooks of their own
    train(stage_run(tmp_path, model, QATStageConfig(epochs=2, gradual=block), **named))
    whole = ("validation", 0, 0)
    assert seen == [("step", 3, 3), ("step", 3, 3), whole, ("step", 0, 3), ("step", 0, 0), whole]
    for file in ("last.pt", "best.pt"):
        saved = load_checkpoint(tmp_path / file)["model"]
        assert not any(key.endswith(".disabled") for key in saved)
