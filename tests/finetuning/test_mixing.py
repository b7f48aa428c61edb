"""Mixup and cutmix: what the model and its teacher see, the loss by the published formulas, and resuming."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.finetuning import Distillation
from qat.training.config.stages import StageConfig
from qat.training.loop.aids import build_mixing
from tests.runs.tiny_training import TinyBatches, curves, stage_run, train


class Batches(TinyBatches):
    """Keeps the last batch that it handed out."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().__iter__():
            self.last = batch
            yield batch


class Seeing(nn.Module):
    """A linear model with `outputs` outputs that keeps the last images that it was trained or asked with."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(outputs)
        self.fc, self.asked = nn.Linear(192, outputs), list[Tensor]()

    def forward(self, images: Tensor) -> Tensor:
        self.asked.append(images)
        output: Tensor = self.fc(images.flatten(1))
        return output


def share_of_own(mixed: Tensor, images: Tensor, kind: str) -> float:
    """Lambda, from the images alone: of x in x' = lambda x + (1 - lambda) y, or of the pixels that are x's."""
    other = images.roll(1, 0)
    if kind == "mixup_alpha":
        apart = (images - other).flatten()
        share = float((mixed - other).flatten() @ apart / (apart @ apart))
        torch.testing.assert_close(mixed, share * images + (1 - share) * other)
        return share
    own = (mixed == images).all(dim=1)
    assert torch.equal(own | (mixed == other).all(dim=1), torch.ones_like(own))
    assert torch.equal(own, own[:1].expand_as(own))  # one rectangle for the batch
    rows, columns = (~own[0]).any(1), (~own[0]).any(0)
    assert torch.equal(~own[0], rows[:, None] & columns)
    return float(own.float().mean())


@pytest.mark.parametrize("outputs", [2, 3])  # one more than there are classes
@pytest.mark.parametrize("kind", ["mixup_alpha", "cutmix_alpha"])
def test_loss_accuracy_and_teacher_are_of_the_mixed_images(kind: str, outputs: int, tmp_path: Path) -> None:
    shares = []
    for seed in range(10):
        model, teacher, batches = Seeing(outputs), Seeing(outputs), Batches(24)
        weight, bias = (each.detach().clone() for each in (model.fc.weight, model.fc.bias))
        stage = StageConfig(lr=0.1, label_smoothing=0.2, **{kind: 1.0})
        run = stage_run(
            tmp_path / str(seed), model, stage, train=batches, mixing=build_mixing(stage, 2),
            distillation=Distillation(teacher),
        )  # fmt: skip
        torch.manual_seed(seed)
        train(run)
        (asked,), trained = teacher.asked, model.asked[0]
        assert torch.equal(asked, trained)
        images, labels = batches.last
        share = share_of_own(trained, images, kind)
        shares.append(share)
        logits = F.linear(trained.flatten(1), weight, bias)
        own, other = (F.cross_entropy(logits, y, label_smoothing=0.2) for y in (labels, labels.roll(1)))
        drawn = curves(tmp_path / str(seed))
        assert drawn["qat/train_loss"] == [(1, pytest.approx(float(share * own + (1 - share) * other), rel=1e-5))]
        stronger = labels if share > 0.5 else labels.roll(1)
        right = 100 * float((logits.argmax(1) == stronger).float().mean())
        assert drawn["qat/train_top1"] == [(1, pytest.approx(right))]
        assert all(torch.equal(seen, original) for seen, (original, _) in zip(model.asked[1:], run.val, strict=True))
    assert len(set(shares)) > 5 and min(shares) < 0.5 < max(shares)


def test_with_both_each_batch_gets_one_of_them(tmp_path: Path) -> None:
    stage = StageConfig(mixup_alpha=1.0, cutmix_alpha=1.0)
    mixing = build_mixing(stage, 2)
    assert mixing is not None and build_mixing(StageConfig(), 2) is None
    torch.manual_seed(0)
    images = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    found = []
    for _ in range(20):
        mixed, shares = mixing(images, torch.tensor([0, 1, 1, 0]))
        assert mixed.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(shares.sum(1), torch.ones(4))
        pasted = bool(((mixed == images) | (mixed == images.roll(1, 0))).all())
        found.append("cutmix_alpha" if pasted else "mixup_alpha")
        assert float(shares[0, 0]) == pytest.approx(1.0)  # images 0 and 3 are of one class
        assert float(shares[1, 1]) == pytest.approx(share_of_own(mixed, images, found[-1]), abs=1e-5)
    assert 5 <= found.count("mixup_alpha") <= 15
