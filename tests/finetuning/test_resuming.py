"""A stage with any of the aids, stopped between or within epochs and resumed, ends bitwise as one that was not."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qat
from qat.finetuning import Distillation
from qat.training.config.stages import QATStageConfig
from qat.training.loop.aids import build_mixing
from qat.training.run.checkpoint import load_checkpoint
from tests.runs.tiny_training import TinyBatches, curves, resume, stage_run, train

AIDS: dict[str, dict[str, Any]] = {
    "averages": {"warmup_epochs": 0.5, "ema_decay": 0.7, "clip_grad_norm": 1.0, "freeze_bn_epoch": 2},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "freeze_scales_epoch": 1},
    "statistics": {"bn_reestimate": "always"},
    "an optimizer of the scales": {"quantizer_optimizer": "adamw", "quantizer_lr": 1e-4},
    "decay by bits": {"weight_decay_by_bits": True},
    "a share of weights": {"quant_noise": {"share": 0.2, "until": 0.9}},
    "freezing, with averages": {
        "oscillation": {"freeze": 0.1, "freeze_from": 0.2, "dampen": 0.01, "momentum": 0.2, "after": 0.0},
        "ema_decay": 0.8,
    },
    "mixup and cutmix": {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
    "accumulation": {"accumulate": 3},
    "a delta from the Hessian": {},
    "distillation": {"distillation": {"features": {"0": 0.5}}},
}


def model(seed: int, ewgs: str) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(8, 2),
    )  # fmt: skip
    images = TinyBatches().images
    prepared = qat.prepare(layers, qat.QuantRecipe({"bits": 2, "ewgs": ewgs}), images[:2])
    qat.calibrate(prepared, [images])
    return prepared


def teacher() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize("aid", list(AIDS))
def test_a_resumed_stage_is_bitwise_the_uninterrupted_one(aid: str, tmp_path: Path) -> None:
    def run(name: str, fields: dict[str, Any], seed: int = 0, **changes: Any) -> Any:
        stage = QATStageConfig(**{"epochs": 3, "lr": 0.2, "weight_decay": 0.05, **fields})
        block = stage.distillation
        distillation = None if block is None else Distillation(teacher(), features=block.features)
        mixing = build_mixing(stage, 2)
        changes |= {"mixing": mixing, "distillation": distillation, "sample": TinyBatches()}
        random.seed(seed)
        np.random.seed(seed)
        ewgs = "hessian" if "Hessian" in aid and fields is AIDS[aid] else "none"
        return stage_run(tmp_path / name, model(seed, ewgs), stage, **changes)

    train(run("without", {}))
    whole = run("whole", AIDS[aid])
    expected = train(whole)
    after = torch.rand(3), random.random(), float(np.random.rand())
    cuts = {"cut": (2, None), "cut within": (4, 1)}
    for name, (batch, every) in cuts.items():
        with pytest.raises(KeyboardInterrupt):
            train(run(name, AIDS[aid], train=TinyBatches(fail_at=(2, batch)), config={"checkpoint_every": every}))
    assert [load_checkpoint(tmp_path / name / "last.pt")["state"]["step"] > 0 for name in cuts] == [False, True]
    for name in (*cuts, "whole"):  # in the last, nothing is left to do
        assert resume(run(name, AIDS[aid], seed=5)) == expected
        assert torch.equal(torch.rand(3), after[0]) and (random.random(), float(np.random.rand())) == after[1:]
    for file, cut in itertools.product(("last.pt", "best.pt"), cuts):
        first, second, other = (load_checkpoint(tmp_path / name / file) for name in ("whole", cut, "without"))
        torch.testing.assert_close(second["model"], first["model"], rtol=0, atol=0)
        assert file == "best.pt" or any(
            not torch.equal(value, other["model"][key]) for key, value in first["model"].items()
        )
    last = [load_checkpoint(tmp_path / name / "last.pt")["state"]["aids"] for name in ("whole", *cuts)]
    for aids in last[1:]:
        torch.testing.assert_close(aids, last[0], rtol=0, atol=0)
    if "freezing" in aid:
        frozen = last[0]["oscillations"]["frozen"]
        assert frozen.any() and not frozen.all()
    drawn = [curves(tmp_path / name) for name in ("whole", *cuts)]
    assert all(
        each.pop(f"qat/train/{tag}") for each in drawn for tag in ("images_per_second", "memory_mb", "data_wait")
    )
    assert drawn[0] == drawn[1] == drawn[2]
