"""The training loop when torch.compile fails, or computes something else than the model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qat.training.config.stages import QATStageConfig
from qat.training.loop.compiled import compiled
from tests.runs.tiny_training import curves, tiny_model
from tests.training.test_engine import stage_run, train


class BrokenError(Exception):
    """An error of a compiler."""


def refusing(*_: Any) -> Any:
    raise BrokenError("no kernel for this device\nand more lines")


def steeper(y: Tensor) -> Tensor:
    return y.detach() + 100 * (y - y.detach())


COMPILERS = {
    "BrokenError: no kernel for this device": lambda model: refusing,
    "the loss of the compiled model is": lambda model: lambda images: model(images) * 50 + 30 * torch.arange(2),
    "the gradients of the compiled model have the norm": lambda model: lambda images: steeper(model(images)),
    "has no gradient in the compiled model": (
        lambda model: lambda images: model(images).detach() + 0 * next(model.parameters()).sum()
    ),
}


def losses_of(folder: Path, compiled: bool) -> list[tuple[int, float]]:
    torch.manual_seed(0)
    run = stage_run(folder, tiny_model(), QATStageConfig(epochs=2, lr=0.1), config={"compile": compiled})
    train(run)
    return curves(folder)["qat/train/loss"]


@pytest.mark.parametrize("reason", COMPILERS)
def test_a_compiled_model_with_other_results_is_not_used(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial step does not change a bit of the run."""
    expected = losses_of(tmp_path / "plain", False)
    monkeypatch.setattr(torch, "compile", lambda model, mode: COMPILERS[reason](model))
    assert losses_of(tmp_path / "compiled", True) == expected
    (said,) = [message for message in caplog.messages if message.startswith("compile: ")]
    assert reason in said and said.endswith("; training goes on without torch.compile, slower")


def test_memory_shortage_is_not_blamed_on_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def starving(images: Tensor) -> Any:
        raise MemoryError

    monkeypatch.setattr(torch, "compile", lambda model, mode: starving)
    model, x = nn.Linear(3, 2), torch.ones(5, 3)
    with pytest.raises(MemoryError):
        compiled(model, model, None, x, lambda run: run(x).sum())


def test_the_trial_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[0].weight.grad = torch.ones(3, 3)
    kept, x, seen = copy.deepcopy(model.state_dict()), torch.randn(7, 3), []
    numbers = torch.get_rng_state()
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)

    def loss_of(forward: Any) -> Tensor:
        seen.append(forward)
        y: Tensor = forward(x).square().mean()
        return y

    compiled(model, model, None, x, loss_of)
    assert len(seen) == 2
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(model[0].weight.grad, torch.ones(3, 3)) and model[0].bias.grad is None
