"""Mixup and cutmix: what the model and its teacher see, the loss of mixed labels, and which of both a batch gets."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.finetuning import Distillation
from qat.training.config.stages import StageConfig
from qat.training.loop.aids import build_mixing
from tests.references.prepared_case import Plain
from tests.runs.tiny_training import TinyBatches, curves, stage_run, train


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
