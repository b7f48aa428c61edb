"""`train()` only switches modes: it compiles and tries out nothing; a model that moves is looked at where it is now."""

import pytest
import torch
from torch import nn

import qat
from qat.codes.graph import FusedGraph
from qat.kernels.cpu import compiler, onednn


def prepared() -> FusedGraph:
    x = torch.randn(4, 3, 8, 8)
    model = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), example_inputs=x)
    assert isinstance(model, FusedGraph)
    return model


def test_train_tries_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared()
    for place, name in ((compiler, "library"), (onednn, "are_exact")):
        monkeypatch.setattr(place, name, lambda *_: pytest.fail("something was tried out in train()"))
    model.eval()
    model.train()


def test_a_model_that_is_moved_after_train_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = prepared().train(), []
    qat.calibrate(model, [torch.randn(4, 3, 8, 8)])
    original = FusedGraph._probe_devices

    def look(self: FusedGraph) -> None:
        original(self)
        seen.append({parameter.device.type for parameter in self.parameters()})

    monkeypatch.setattr(FusedGraph, "_probe_devices", look)
    model.double().float()
    assert seen == []
    nn.ModuleList([model]).to("meta")
    assert seen == [{"meta"}]
