"""A small run of `train.py` in the folder of a test: a model of one's own on some of the digits."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qat.training import script as train

TINY_MODEL = """
from torch import nn

def tiny(num_classes, channels=8):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )

def wrapped(num_classes):
    return nn.DataParallel(tiny(num_classes))

def flat(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(5, num_classes))
"""
CONFIG = """
model: {name: 'tinymodels:tiny'}
data: {name: digits, image_size: 16, batch_size: 32, limit_train: 128, limit_val: 100}
float: {epochs: 2, lr: 0.05}
qat: {epochs: 2, lr: 0.01}
quantization: {calibration_batches: 2}
log_every: 2
watch: "off"
"""
FILES = {"tinymodels.py": TINY_MODEL, "tiny.yaml": CONFIG}


@contextmanager
def standing_in(folder: Path, files: dict[str, str]) -> Iterator[Path]:
    """The folder as the current one, with these files; what was imported from them is forgotten at the end."""
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    for name in files:
        sys.modules.pop(Path(name).stem, None)


def start(*arguments: str) -> int:
    return train.main(["--config", "tiny.yaml", *arguments])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a start that ends with status 2 before it makes a run folder."""
    before = set(Path().iterdir())
    assert start(*arguments) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and set(Path().iterdir()) - {Path("__pycache__")} == before
    return said


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))
