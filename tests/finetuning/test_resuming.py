"""Runs with each aid, stopped between epochs and resumed, end bitwise as those that were not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qat.training import script as train
from qat.training.run import stages

AIDS = {
    "an optimizer of the scales": ((), ("qat.quantizer_optimizer=adamw", "qat.quantizer_lr=1e-4")),
    "decay by bits": (("quantization.weight.bits=2", "qat.weight_decay=0.05"), ("qat.weight_decay_by_bits=true",)),
    "activations after weights": ((), ("qat.gradual={activations_from: 0.8}",)),
    "a share of weights": ((), ("qat.gradual={weight_share: 0.2, weights_from: 0.9}",)),
}
"""What else the run's config says, and the aid."""


def start(name: str, *arguments: str) -> int:
    return train.main(["--config", "tiny.yaml", "qat.epochs=3", "qat.optimizer=sgd", f"run_dir={name}", *arguments])


@pytest.mark.parametrize("aid", list(AIDS))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, aid: str
) -> None:
    def train_stage(run: stages.StageRun, state: Any = None) -> Any:
        set_epoch = run.train.set_epoch

        def watched(number: int) -> None:
            if stop and run.name == "qat" and number == run.epochs_before + 2:
                raise KeyboardInterrupt
            set_epoch(number)

        monkeypatch.setattr(run.train, "set_epoch", watched)
        try:
            return real(run, state)
        finally:
            monkeypatch.setattr(run.train, "set_epoch", set_epoch)

    common, wanted = AIDS[aid]
    real, stop = stages.train_stage, False
    monkeypatch.setattr(stages, "train_stage", train_stage)
    assert start("whole", *common, *wanted) == 0
    stop = True
    assert start("parts", *common, *wanted) == 130
    stop = False
    assert start("parts", *common, *wanted, "resume=auto") == 0
    assert start("without", *common) == 0
    for file in ("last.pt", "best.pt"):
        whole, parts = (torch.load(folder / name / file, weights_only=True)["model"] for name in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert [key for key, value in whole.items() if not torch.equal(value, parts[key])] == []
    last, without = (torch.load(folder / name / "last.pt", weights_only=True)["model"] for name in ("whole", "without"))
    assert any(not torch.equal(value, without[key]) for key, value in last.items())
    results = [json.loads((folder / name / "summary.json").read_text()) for name in ("whole", "parts")]
    assert results[0]["qat"] == results[1]["qat"]
