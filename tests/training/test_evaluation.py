"""Evaluation (means over images, outputs of all kinds, an unchanged model), the warnings about its results, and the
statistics of BatchNorm before it: noticed where they lag behind the weights, and estimated anew."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qat.batch_norm import reestimate_batch_norm
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.loop import evaluation
from qat.training.loop.evaluation import EPOCH_OFFSET, Evaluation, evaluate, settle_statistics, warnings_about
from qat.training.tasks.known import CLASSIFICATION
from tests.runs.tiny_training import CPU, Outputs, Returns, TinyBatches, stage_run, tiny_model, train, user_error


@pytest.mark.parametrize("wrap", [
    lambda y: y,
    lambda y: Outputs(None, y),
    lambda y: [y, -y],
    lambda y: {"aux": -y, "logits": y},
    lambda y: {"out": y, "aux": -y},
])  # fmt: skip
def test_evaluation_is_the_mean_over_images(wrap: Any) -> None:
    torch.manual_seed(0)
    model, batches = Returns(wrap), TinyBatches(7)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    logits = model.fc(batches.images[order].flatten(1)).detach()
    labels = batches.labels[order]
    result = evaluate(model, batches, CPU)
    assert result.count == 24
    assert result.score == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert 0 < result.score < 100
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_evaluation_leaves_no_trace() -> None:
    model = tiny_model().train()
    model.bn.eval()
    flags = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()
    first = evaluate(model, TinyBatches(), CPU, progress="validation")
    assert evaluate(model, TinyBatches(), CPU) == first
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


def test_without_logits_or_images_there_is_a_sentence() -> None:
    for wrap, got in ((lambda y: {"loss": y}, "dict"), (lambda y: [], "list")):
        said = user_error(evaluate, Returns(wrap), TinyBatches(7), CPU)
        assert said == f"model: it must return logits of shape (7, classes), but returned {got}"
    assert user_error(evaluate, tiny_model(), [], CPU) == "data: the split to evaluate on has no images"


@pytest.mark.parametrize(("top1", "most_common", "count", "warned"), [
    (10.0, 10.0, 360, True),
    (12.5, 10.0, 360, True),  # chance plus less than two deviations (1.58 each)
    (13.5, 10.0, 360, False),
    (99.0, 99.0, 1000, True),  # one class nearly always
    (100.0, 60.0, 5, False),
    (100.0, 100.0, 50, True),  # all images are of one class
])  # fmt: skip
def test_chance_level_is_the_accuracy_of_a_constant_prediction(
    top1: float, most_common: float, count: int, warned: bool
) -> None:
    result = Evaluation(top1, 1.0, count, most_common)
    found = warnings_about("float", "float.lr", StageConfig(epochs=3, lr=1e9), result, None, CLASSIFICATION)
    luck = ", with luck up to 13.16 %" if top1 == 12.5 else ""  # point 62: it is above what one answer gives
    sentence = (
        f"float: val top1 {top1:.2f} % is at chance level: the same answer for all {count} images gives"
        f" {most_common:.2f} %{luck}; try a lower float.lr (now 1e+09) or more epochs"
    )
    assert found == ([sentence] if warned else [])
    untrained = warnings_about("float", "float.lr", StageConfig(epochs=0), result, None, CLASSIFICATION)
    assert "try" not in "".join(untrained)


@pytest.mark.parametrize(("top1", "warned"), [(96.0, False), (94.5, False), (90.0, True)])
def test_a_loss_of_accuracy_beyond_noise_gives_a_warning(top1: float, warned: bool) -> None:
    found = warnings_about(
        "qat", "qat.lr", QATStageConfig(epochs=3), Evaluation(top1, 1.0, 360, 10.0), 96.0, CLASSIFICATION
    )
    sentence = (
        "qat: val top1 90.00 % is below the 96.00 % that it started from; try a lower qat.lr (now 0.01) or more epochs"
    )
    assert found == ([sentence] if warned else [])


def lagging() -> nn.Module:
    """A trained model whose statistics are still those of a new layer, while its convolution has another mean."""
    model = tiny_model()
    with torch.no_grad():
        model.conv.bias.add_(50)
    model.bn.momentum, model.dropout.p = 1e-6, 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        batches = TinyBatches(12)
        batches.set_epoch(epoch)
        for images, labels in batches:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def stage(**settings: Any) -> QATStageConfig:
    return QATStageConfig(**{"epochs": 2, "lr": 0.05, "ema_decay": None, **settings})


def settling(
    folder: Path, model: nn.Module | None = None, batches: Any = None, mixing: Any = None, **settings: Any
) -> Any:
    """A stage whose statistics lag; its sample is of plain images."""
    more = {} if batches is None else {"train": batches}
    model = lagging() if model is None else model
    return stage_run(folder, model, stage(**settings), sample=TinyBatches(), mixing=mixing, **more)


@pytest.mark.parametrize("averaged", [None, 0.5])
def test_evaluation_follows_training_where_statistics_lag(tmp_path: Path, averaged: float | None, capsys: Any) -> None:
    losses = {}
    for choice in ("never", "auto", "always"):
        run = settling(tmp_path / choice, bn_reestimate=choice, ema_decay=averaged)
        losses[choice] = train(run).loss
        assert ("estimated anew" in capsys.readouterr().out) is (choice != "never")
        assert losses[choice] == evaluate(run.model, run.val, CPU).loss  # what is exported is what was evaluated
    assert max(losses["auto"], losses["always"]) < losses["never"] - 0.3


def test_settled_statistics_stay_to_the_bit(tmp_path: Path) -> None:
    run = settling(tmp_path)
    assert settle_statistics(run, 1)
    before = run.model.bn.running_var.clone()
    assert settle_statistics(run, 1) == "" and torch.equal(run.model.bn.running_var, before)
    run.stage = stage(bn_reestimate="always")
    assert "1 BatchNorms" in settle_statistics(run, 1)


@pytest.mark.parametrize(
    ("before", "after", "kept"), [(0.1, 0.085, True), (0.1, 0.092, False), (2.0, 1.93, False), (2.0, 1.88, True)]
)
def test_new_statistics_have_to_be_clearly_better(
    before: float, after: float, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 0.01, and by a twentieth of the loss: both."""
    losses = iter((before, after))
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: evaluation.Evaluation(0, next(losses), 1, 0))
    run = settling(tmp_path)
    run.model.bn.running_var.mul_(0.5)  # not those that it began with
    assert bool(settle_statistics(run, 1)) is kept


@pytest.mark.parametrize("case", ["never", "frozen", "no sample", "no norm"])
def test_where_nothing_is_estimated(case: str, tmp_path: Path) -> None:
    model = lagging()
    settings = {"never": {"bn_reestimate": "never"}, "frozen": {"bn_reestimate": "always", "freeze_bn_epoch": 0}}
    run = settling(tmp_path, model, **settings.get(case, {}))
    if case == "no sample":
        run.sample = None
    if case == "no norm":
        model.bn = nn.Identity()
    assert settle_statistics(run, 1) == ""
    assert case == "no norm" or float(model.bn.running_var.max()) < 1.1


def test_batches_of_one_image_are_left_out(tmp_path: Path) -> None:
    run = settling(tmp_path, batches=TinyBatches(23), bn_reestimate="always")
    run.model.bn.momentum = None  # else the count is one of settled statistics
    settle_statistics(run, 1)
    assert int(run.model.bn.num_batches_tracked) == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_the_statistics_are_of_training_batches_as_steps_get_them(mixed: bool, tmp_path: Path) -> None:
    """Not of the plain sample; mixed where training mixes; and no random number of training's is drawn."""
    train_batches = TinyBatches(6)
    train_batches.images = train_batches.images * 3 + 1
    mixing = (lambda images, labels: (images * torch.rand(()), labels)) if mixed else None
    run = settling(tmp_path, batches=train_batches, mixing=mixing, bn_reestimate="always")
    run.epochs_before = 4
    before = torch.get_rng_state()
    settle_statistics(run, 1)
    assert torch.equal(torch.get_rng_state(), before)
    expected = copy.deepcopy(run.model)
    train_batches.set_epoch(EPOCH_OFFSET + 5)
    torch.manual_seed(1)
    batches = [mixing(*batch)[0] if mixing else batch[0] for batch in train_batches]
    assert reestimate_batch_norm(expected, batches) == 1
    torch.testing.assert_close(run.model.bn.running_mean, expected.bn.running_mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(run.model.bn.running_var, expected.bn.running_var, rtol=1e-5, atol=0)


def test_without_training_only_always_touches_statistics_that_are_not_young(tmp_path: Path, capsys: Any) -> None:
    for choice, young in (("auto", False), ("always", False), ("auto", True), ("never", True)):
        run = settling(tmp_path, epochs=0, bn_reestimate=choice)
        run.model.bn.running_var.mul_(1.0 if young else 0.5)
        train(run)
        said = "qat: statistics of 1 BatchNorms" in capsys.readouterr().out
        assert said is (choice == "always" or (choice == "auto" and young))
