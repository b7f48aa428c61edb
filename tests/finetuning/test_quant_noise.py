"""Quant-noise: formula and gradient of a part, what is whole, and a run's evaluations."""

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
from qat.finetuning import QuantNoise
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


def test_what_was_switched_off_before_stays_off(model: Any, images: Tensor) -> None:
    qat.disable_fake_quant(model, "2", activations=False)
    before = model(images)
    noise = QuantNoise(model, share=0.0)
    noise.set_progress(0.0)
    assert not model.get_submodule("2.weight_quantizer")._forward_hooks
    noise.complete()
    assert torch.equal(model(images), before)


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.3), (0.2, 0.65), (0.4, 1.0), (1.0, 1.0)])
def test_a_share_of_each_weight_is_quantized_and_the_rest_passes(model: Any, progress: float, share: float) -> None:
    """In 40,000 elements of a layer; the gradient of a part in float is 1 even where the grid clips."""
    layer = qat.QuantLinear(200, 200, weight_spec=qat.QuantSpec(bits=2), activation_spec=None).train()
    layer.weight_quantizer.scale.data *= 0.25
    noise = QuantNoise(layer, share=0.3, until=0.4)
    quantized = layer.quantized(layer.weight).detach()
    noise.set_progress(progress)
    assert noise.rate == pytest.approx(share)
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
    noise = QuantNoise(model, share=0.5)
    noise.set_progress(0.1)
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(model(images))
    assert torch.equal(answers[0], answers[1]) and not torch.equal(answers[0], answers[2])
    assert torch.equal(model.eval()(images), evaluated)
    before = torch.get_rng_state()
    noise.complete()
    assert torch.equal(model.train()(images), plain)
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn any more


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_that_is_made_meanwhile_is_whole(copied: Callable[[Any], Any], model: Any, images: Tensor) -> None:
    plain = model.train()(images)
    noise = QuantNoise(model, share=0.5)
    noise.set_progress(0.1)
    other = copied(model)
    assert not torch.equal(model(images), plain) and torch.equal(other.train()(images), plain)
    assert not any(module._forward_hooks for module in other.modules())
    kept = [each for each in model.modules() if each._forward_hooks]
    noise.complete()
    assert kept and not any(each._forward_hooks for each in kept)


def test_the_kernels_come_back_once_all_is_quantized(model: Any, images: Tensor) -> None:
    noise = QuantNoise(model, share=0.5)
    before = str(qat.explain(model))
    noise.set_progress(0.0)
    assert "a hook waits for its call" in str(qat.explain(model)) and str(qat.explain(model)) != before
    noise.complete()
    model(images)
    assert str(qat.explain(model)) == before


LAYER = qat.QuantLinear(2, 2)
REFUSED: list[tuple[Any, dict[str, float], str]] = [
    (LAYER, {"share": 1.0}, "share must be from 0 to below 1, got 1.0"),
    (LAYER, {"share": 0.5, "until": 0.0}, "until must be above 0 to 1, got 0.0"),
    (nn.Linear(2, 2), {"share": 0.5}, "the model has no quantizer of weights; call qat.prepare"),
    (3, {"share": 0.5}, "model must be a torch.nn.Module, got int"),
    (LAYER, {"share": 0.5}, "progress must be from 0 to 1, got 1.5"),
]


@pytest.mark.parametrize(("model", "given", "fact"), REFUSED)
def test_what_cannot_be_is_refused(model: Any, given: dict[str, float], fact: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'QuantNoise: {fact}')}"):
        QuantNoise(model, **given).set_progress(1.5)


def test_a_stage_evaluates_and_saves_the_whole_model_after_every_epoch(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step, real_validate, seen = engine.Training.step, engine._validate, list[Any]()

    def note(what: str) -> None:
        seen.append((what, sum(len(each._forward_hooks) for each in model.modules())))

    monkeypatch.setattr(engine.Training, "step", lambda *given, **named: (note("step"), real_step(*given, **named))[1])
    monkeypatch.setattr(engine, "_validate", lambda *given: (note("validation"), real_validate(*given))[1])
    block = {"share": 0.5, "until": 0.8}
    batches = TinyBatches(12)
    batches.images = batches.images[:, :, :6, :6]
    named = {"train": batches, "val": batches, "config": {"watch": "scales"}}  # else evaluations have hooks
    train(stage_run(tmp_path, model, QATStageConfig(epochs=2, quant_noise=block), **named))
    whole = ("validation", 0)
    assert seen == [("step", 3), ("step", 3), whole, ("step", 3), ("step", 0), whole]
    for file in ("last.pt", "best.pt"):
        saved = load_checkpoint(tmp_path / file)["model"]
        assert not any(key.endswith(".disabled") for key in saved)
