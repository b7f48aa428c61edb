"""The ranks together train on what one process would: the same images, sums, statistics and weights."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qat
from qat.collectives import rank
from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.config.stages import QATStageConfig
from qat.training.data import loaders
from qat.training.data.loaders import RankBatches, load_data
from qat.training.loop.evaluation import evaluate
from qat.training.ranks import seed_everything
from tests.runs.tiny_training import CPU, Patch, curves, on_ranks, stage_run, train


@pytest.mark.parametrize("images", [7, 8, 12, 13, 30])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("whole", [False, True])
def test_the_shares_of_a_batch_make_it_up(images: int, count: int, whole: bool, monkeypatch: Patch) -> None:
    def shares(first: int, alone: bool = False) -> list[list[list[int]]]:
        found = []
        for number in range(count):
            monkeypatch.setattr(loaders, "rank", lambda number=number: number)
            batches = RankBatches(range(images), 8, whole, alone)
            batches.first = first
            found.append(list(batches))
        return found

    monkeypatch.setattr(loaders, "rank_count", lambda: count)
    one = [list(range(start, min(start + 8, images))) for start in range(0, images, 8)]
    if whole and len(one) > 1 and images % 8:
        one = one[:-1]
    if whole:
        one[-1] = one[-1][: len(one[-1]) // count * count]
    for first in range(len(one)):
        found = shares(first)
        assert sorted(image for rank in found for batch in rank for image in batch) == [*chain(*one[first:])]
        assert not whole or len({tuple(map(len, rank)) for rank in found}) == 1
        for number, batch in enumerate(one[first:]):
            assert [*chain(*(rank[number] for rank in found if number < len(rank)))] == batch
    assert len(RankBatches(range(images), 8, whole)) == len(one)
    assert shares(0, alone=True)[1:] == [[]] * (count - 1)


def trained(folder: Path, together: bool = True) -> dict[str, Any]:
    """Three epochs on the digits, whose last batches are uneven, with sums over two batches and averaged weights."""
    config = DataConfig(
        name="digits", image_size=12, batch_size=16, eval_batch_size=30, limit_train=100, limit_val=61,
        augment=AugmentConfig(crop_padding=1),
    )  # fmt: skip
    seed_everything(0)
    data = load_data(config, 0, CPU, channels_last=True)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        nn.Linear(54, 10),
    )  # fmt: skip
    model = qat.prepare(layers, qat.QuantRecipe(), torch.zeros(1, 3, 12, 12))
    qat.calibrate(model, data.calibration(2, alone=True))
    ranges = {name: value.clone() for name, value in model.state_dict().items()}
    stage = QATStageConfig(epochs=3, lr=0.05, accumulate=2, clip_grad_norm=1.0, ema_decay=0.8, bn_reestimate="never")
    own = {"batch_size": 16, "limit_train": 100}
    run = stage_run(
        folder, model, stage, train=data.train, val=data.val,
        config={"sync_batch_norm": together, "log_every": 2, "data": {"name": "digits", **own}},
    )  # fmt: skip
    evaluation = train(run)
    again = evaluate(model, data.val, CPU)
    calibrating = [len(labels) for _, labels in data.calibration(2, alone=True)]
    assert calibrating == ([16, 16] if rank() == 0 else [])
    return {"model": model.state_dict(), "ranges": ranges, "evaluation": vars(evaluation), "again": vars(again)}


def on_a_rank(rank: int) -> dict[str, Any]:
    return {**trained(Path("ranks")), "apart": trained(Path("apart"), together=False)}


def test_two_ranks_train_as_one_process(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    one, ranks = trained(tmp_path / "one"), on_ranks(on_a_rank, tmp_path)
    for mine in ranks:
        torch.testing.assert_close(mine["ranges"], one["ranges"], rtol=0, atol=0)
        torch.testing.assert_close(mine["model"], one["model"], rtol=1e-3, atol=1e-4)
        assert mine["evaluation"] == ranks[0]["evaluation"]
        # What was evaluated is what rank 0 keeps, also where each rank had statistics of its own.
        assert mine["apart"]["evaluation"] == mine["apart"]["again"]
        torch.testing.assert_close(mine["apart"]["model"], ranks[0]["apart"]["model"], rtol=0, atol=0)
    drawn = [curves(tmp_path / name) for name in ("one", "ranks")]
    assert drawn[0].keys() == drawn[1].keys()
    for name in ("qat/train/loss", "qat/train/top1", "qat/val/loss", "qat/train/grad_norm", "qat/val/top1"):
        found, wanted = (torch.tensor(each[name], dtype=torch.float64) for each in drawn)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
