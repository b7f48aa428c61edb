"""The folder in which a test of the training script runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TINY_MODEL = """
from torch import nn

def tiny(num_classes, channels=8):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )

def flat(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(5, num_classes))
"""
CONFIG = """
model: {name: 'tinyaids:tiny'}
data: {name: digits, image_size: 16, batch_size: 32, limit_train: 128, limit_val: 100}
float: {epochs: 1, lr: 0.05}
qat: {epochs: 2, optimizer: sgd, lr: 0.01}
quantization: {calibration_batches: 2, weight: {bits: 4}, activation: {bits: 4}}
export: {onnx: false}
log_every: 2
watch: "off"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a config `tiny.yaml` and the model that it names, forgotten at the end."""
    (tmp_path / "tinyaids.py").write_text(TINY_MODEL)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("tinyaids", None)
