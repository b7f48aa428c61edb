"""`export_litert` where ai-edge-litert is not installed."""

import importlib.util

import pytest
import torch
from torch import nn

import qat


def test_one_sentence_names_the_extra(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sentence = r"^export_litert: ai-edge-litert is not installed; pip install ste-qat\[litert\]$"
    with pytest.raises(ImportError, match=sentence):
        qat.export_litert(nn.Linear(2, 2), tmp_path / "model.tflite", torch.zeros(1, 2))
