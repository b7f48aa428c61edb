"""Accumulation, where N batches of B images are one of N * B; and mixup and cutmix: what models see, and the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.finetuning import Distillation, grouped
from qat.quantizer import create_quantizer
from qat.spec import QuantSpec
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.loop.aids import build_mixing
from tests.references.prepared_case import Plain
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


def seeing(outputs: int) -> Any:
    """A linear model that keeps the images that it was trained or asked with."""
    model = Plain(lambda self, x: self.asked.append(x) or self.fc(x.flatten(1)), fc=nn.Linear(192, outputs))
    model.asked = list[Tensor]()
    return model


@pytest.mark.parametrize("outputs", [2, 3])  # one more than there are classes
def test_loss_accuracy_and_teacher_are_of_the_mixed_images(outputs: int, tmp_path: Path) -> None:
    def mixing(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        shares = F.one_hot(labels, 2).float()
        return 0.3 * images + 0.7 * images.roll(1, 0), 0.3 * shares + 0.7 * shares.roll(1, 0)

    model, teacher, batches = seeing(outputs), seeing(outputs), TinyBatches(24)
    weight, bias = (each.detach().clone() for each in (model.fc.weight, model.fc.bias))
    stage = StageConfig(lr=0.1, label_smoothing=0.2)
    run = stage_run(tmp_path, model, stage, train=batches, mixing=mixing, distillation=Distillation(teacher))
    train(run)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    images, labels = batches.images[order], batches.labels[order]
    mixed = mixing(images, labels)[0]
    assert torch.equal(model.asked[0], mixed) and torch.equal(teacher.asked[0], mixed)
    logits = F.linear(mixed.flatten(1), weight, bias)
    own, other = (F.cross_entropy(logits, y, label_smoothing=0.2) for y in (labels, labels.roll(1)))
    drawn = curves(tmp_path)
    assert drawn["qat/train/loss"] == [(1, pytest.approx(float(0.3 * own + 0.7 * other), rel=1e-5))]
    right = 100 * float((logits.argmax(1) == labels.roll(1)).float().mean())  # of the stronger label
    assert drawn["qat/train/top1"] == [(1, pytest.approx(right))]
    assert all(torch.equal(seen, original) for seen, (original, _) in zip(model.asked[1:], run.val, strict=True))


def test_with_both_each_batch_gets_one_of_them() -> None:
    assert build_mixing(StageConfig(), 2) is None
    torch.manual_seed(0)
    images = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    for alphas, expected in (((1.0, 1.0), {True, False}), ((1.0, 0.0), {False}), ((0.0, 1.0), {True})):
        mixing = build_mixing(StageConfig(mixup_alpha=alphas[0], cutmix_alpha=alphas[1]), 2)
        assert mixing is not None
        pasted = set()
        for _ in range(20):
            mixed, shares = mixing(images, torch.tensor([0, 1, 1, 0]))
            assert mixed.is_contiguous(memory_format=torch.channels_last) and shares.shape == (4, 2)
            pasted.add(bool(((mixed == images) | (mixed == images.roll(1, 0))).all()))
        assert pasted == expected
