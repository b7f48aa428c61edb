"""Gradient accumulation: N batches of B images are one of N * B, in the library's loop and in one of one's own."""

from pathlib import Path

import pytest
import torch
from torch import nn

from qat.finetuning import Distillation, grouped
from qat.quantizer import create_quantizer
from qat.spec import QuantSpec
from qat.training.config.stages import QATStageConfig
from tests.runs.tiny_training import TinyBatches, curves, stage_run, train

STAGE = {"epochs": 3, "lr": 0.05, "warmup_epochs": 1, "clip_grad_norm": 0.3, "ema_decay": 0.8, "label_smoothing": 0.1}


def test_groups_have_the_batches_in_order_and_the_last_what_is_left() -> None:
    read: list[int] = []
    groups = grouped((read.append(number) or number for number in range(7)), 3)
    assert next(groups) == [0, 1, 2] and read == [0, 1, 2]  # no batch is read before its group
    assert list(groups) == [[3, 4, 5], [6]]
    assert list(grouped(range(4), 2)) == [[0, 1], [2, 3]] and list(grouped([], 2)) == []
    with pytest.raises(ValueError, match="grouped: count must be at least 1, got 0"):
        grouped([], 0)


def penalised(seed: int = 0) -> nn.Module:
    """A model with a penalty and a scale, without BatchNorm."""
    torch.manual_seed(seed)
    quantizer = create_quantizer(QuantSpec(bits=4, signed=False, rule="pact"))
    quantizer.set_range(torch.tensor(0.0), torch.tensor(3.0))
    return nn.Sequential(nn.Conv2d(3, 4, 3), quantizer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("small", "accumulate", "large"),
    [
        (5, 2, 10),  # 5 + 5, 5 + 5, 4
        (9, 3, 24),  # 9 + 9 + 6: shares are of images, not of batches
        (4, 4, 16),  # 4 + 4 + 4 + 4, 4 + 4: the last group is incomplete
    ],
)
def test_small_batches_accumulated_are_large_batches(small: int, accumulate: int, large: int, tmp_path: Path) -> None:
    """Weights, averages and curves, with clipping, penalties and a teacher."""
    found = {}
    for name, size, fields in (("large", large, {}), ("small", small, {"accumulate": accumulate})):
        stage = QATStageConfig(**STAGE, **fields)  # type: ignore[arg-type]
        distillation = Distillation(penalised(5), temperature=2.0)
        run = stage_run(
            tmp_path / name, penalised(), stage, train=TinyBatches(size), distillation=distillation,
            config={"log_every": 1},
        )  # fmt: skip
        train(run)
        drawn = curves(tmp_path / name)
        assert all(drawn.pop(f"qat/train/{tag}") for tag in ("images_per_second", "memory_mb", "data_wait"))
        found[name] = dict(run.model.state_dict()), drawn
    assert found["large"][1]["qat/train/loss"][-1][0] == 3 * -(-24 // large)
    torch.testing.assert_close(found["small"][0], found["large"][0], rtol=1e-4, atol=1e-6)
    for tag, points in found["large"][1].items():
        assert found["small"][1][tag] == [(step, pytest.approx(value, rel=1e-3, abs=1e-6)) for step, value in points]


def test_progress_counts_optimizer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    model = nn.Sequential(create_quantizer(QuantSpec(bits=4, signed=False, rule="stacked_sigmoid")), penalised())
    monkeypatch.setattr(type(model[0]), "set_progress", lambda self, share: seen.append(share))
    model[0].set_range(torch.tensor(0.0), torch.tensor(3.0))
    train(stage_run(tmp_path, model, QATStageConfig(epochs=2, accumulate=2)))
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])  # 3 steps of 5 batches, twice
