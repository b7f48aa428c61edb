"""The moving average of weights: its formula, what it leaves alone, and its state."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from qat.finetuning import EMA


class Averaged(nn.Module):
    """A scale, a tied weight, and buffers that must not be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.tied = self.scale
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("count", torch.tensor(0))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.scale.fill_(value)
            self.mean.fill_(-value)
            self.count.add_(1)


def test_ema_follows_its_formula_and_restores_the_model() -> None:
    model = Averaged()
    ema = EMA(model, 0.75)
    expected = np.array([1.0, 2.0, 0.0])
    for value in (0.5, 1e-9, 1e-9):
        model.set(value)
        ema.update(model)
        expected = 0.75 * expected + 0.25 * np.array([value, value, -value])
    parameter = model.scale
    with pytest.raises(RuntimeError, match="stop"), ema.swapped(model):
        np.testing.assert_allclose([*model.scale.tolist(), model.mean.item()], expected, rtol=1e-6)
        assert model.scale.min() > 0
        assert model.count.item() == 3
        assert model.mask.tolist() == [0.0, -math.inf]
        model.count.add_(5)  # as an evaluation may
        raise RuntimeError("stop")
    assert model.count.item() == 3
    assert model.scale is parameter
    assert model.scale.tolist() == [np.float32(1e-9)] * 2
    assert model.mean.item() == np.float32(-1e-9)
    ema.copy_to(model)
    np.testing.assert_allclose(model.scale.tolist(), expected[:2], rtol=1e-6)


def test_ema_state_loads_into_another_ema() -> None:
    model = Averaged()
    ema, other = EMA(model, 0.5), EMA(Averaged(), 0.5)
    model.set(3.0)
    ema.update(model)
    saved = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    other.load_state_dict(saved)
    model.set(7.0)
    ema.update(model)
    assert {name: tensor.tolist() for name, tensor in other.state_dict().items()} == {"scale": [2.0, 2.5], "mean": -1.5}
    with pytest.raises(ValueError, match=r"^EMA: the averages are of another model; they differ in 'weight'$"):
        other.load_state_dict({**saved, "weight": torch.zeros(1)})


def test_what_cannot_be_averaged_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=re.escape("EMA: decay must be from 0 to 1, got 1.5")):
        EMA(nn.Linear(1, 1), 1.5)
    with pytest.raises(TypeError, match=r"^EMA: model must be a torch\.nn\.Module, got list"):
        EMA([], 0.9)  # type: ignore[arg-type]
