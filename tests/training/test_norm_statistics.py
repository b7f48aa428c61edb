"""Statistics of BatchNorm that lag behind the weights: noticed, and estimated anew before an evaluation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import CPU, TinyBatches, resume, stage_run, tiny_model, train
from torch import nn

from qat.training.config.schema import QATStageConfig
from qat.training.loop.evaluation import evaluate
from qat.training.loop.norm_statistics import settle_statistics


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


@pytest.mark.parametrize("averaged", [None, 0.5])
def test_evaluation_follows_training_where_statistics_lag(tmp_path: Path, averaged: float | None, capsys: Any) -> None:
    losses = {}
    for choice in ("never", "auto", "always"):
        run = stage_run(
            tmp_path / choice, lagging(), stage(bn_reestimate=choice, ema_decay=averaged), sample=TinyBatches()
        )
        losses[choice] = train(run).loss
        assert ("estimated anew" in capsys.readouterr().out) is (choice != "never")
        assert losses[choice] == evaluate(run.model, run.val, CPU).loss  # what is exported is what was evaluated
    assert max(losses["auto"], losses["always"]) < losses["never"] - 0.3


def test_settled_statistics_stay_to_the_bit(tmp_path: Path) -> None:
    run = stage_run(tmp_path, lagging(), stage(), sample=TinyBatches())
    assert settle_statistics(run, 1)
    before = run.model.bn.running_var.clone()
    assert settle_statistics(run, 1) == "" and torch.equal(run.model.bn.running_var, before)
    run.stage = stage(bn_reestimate="always")
    assert "1 BatchNorms" in settle_statistics(run, 1)


@pytest.mark.parametrize("case", ["never", "frozen", "no sample", "no norm"])
def test_where_nothing_is_estimated(case: str, tmp_path: Path) -> None:
    model = lagging()
    settings = {"never": {"bn_reestimate": "never"}, "frozen": {"bn_reestimate": "always", "freeze_bn_epoch": 0}}
    run = stage_run(
        tmp_path, model, stage(**settings.get(case, {})), sample=None if case == "no sample" else TinyBatches()
    )
    if case == "no norm":
        model.bn = nn.Identity()
    assert settle_statistics(run, 1) == ""
    assert case == "no norm" or float(model.bn.running_var.max()) < 1.1


def test_a_run_that_goes_on_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = stage_run(tmp_path / "whole", lagging(), stage(epochs=3), sample=TinyBatches())
    train(whole)
    stopped = stage_run(
        tmp_path / "half", lagging(), stage(epochs=3), train=TinyBatches(fail_at=(2, 1)), sample=TinyBatches()
    )
    with pytest.raises(KeyboardInterrupt):
        train(stopped)
    again = stage_run(tmp_path / "half", tiny_model(1), stage(epochs=3), sample=TinyBatches())
    again.model.bn.momentum, again.model.dropout.p = 1e-6, 0.0
    resume(again)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_batches_of_one_image_are_left_out(tmp_path: Path) -> None:
    run = stage_run(tmp_path, lagging(), stage(bn_reestimate="always"), sample=TinyBatches(23))
    settle_statistics(run, 1)
    assert int(run.model.bn.num_batches_tracked) == 1


def test_without_training_only_always_touches_the_statistics(tmp_path: Path, capsys: Any) -> None:
    for choice in ("auto", "always"):
        run = stage_run(tmp_path, lagging(), stage(epochs=0, bn_reestimate=choice), sample=TinyBatches())
        train(run)
        assert ("qat: statistics of 1 BatchNorms" in capsys.readouterr().out) is (choice == "always")
