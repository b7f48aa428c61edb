"""The folder in which a test of the training script runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.small_run import TINY_MODEL, standing_in

CONFIG = """
model: {name: 'tinymodels:tiny'}
data: {name: digits, image_size: 16, batch_size: 32, limit_train: 128, limit_val: 100}
float: {epochs: 1, lr: 0.05}
qat: {epochs: 2, optimizer: sgd, lr: 0.01}
quantization: {calibration_batches: 2, weight: {bits: 4}, activation: {bits: 4}}
export: {onnx: false}
log_every: 2
watch: "off"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The current folder, with a config of few bits and the model that it names."""
    with standing_in(tmp_path, {"tinymodels.py": TINY_MODEL, "tiny.yaml": CONFIG}):
        yield tmp_path
