"""Two small runs of `train.py`: of a torchvision model on image files, and of a model of one's own on the digits."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qat.training import script as train

PETS = """
model: {name: squeezenet1_1}
data: {name: imagefolder, root: images, image_size: 48, resize_size: 52, batch_size: 8, workers: 0}
float: {epochs: 1, lr: 0.01}
qat: {epochs: 3, lr: 0.001}
quantization: {calibration_batches: 2}
"""
OWN = """
model: {name: 'tinymodels:tiny'}
data: {name: digits, image_size: 12, resize_size: 16, batch_size: 32, limit_train: 128, limit_val: 100}
float: {epochs: 1, lr: 0.05}
qat: {epochs: 2, lr: 0.05, ema_decay: 0.9, bn_reestimate: always}
quantization: {calibration_batches: 2}
log_every: 1
watch: scales
"""
TINY_MODEL = """
from torch import nn

def tiny(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, num_classes),
    )
"""
SIZES = ("data.limit_train=1000", "data.limit_val=300", "float.epochs=6", "float.lr=0.2", "qat.epochs=0")
PLAIN = ("quantization.residual_bits=8", "qat.ema_decay=null", "qat.bn_reestimate=auto", "export.onnx=false")
CLASSES = ("cat", "dog", "ship")


def write_images(root: Path) -> None:
    """Photographs of a kind: a colour for each class, noise, and sides from 40 to 90 pixels."""
    numbers = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for each in range(count):
                pixels = numbers.integers(0, 200, (*numbers.integers(40, 90, 2), 3), dtype=np.uint8)
                pixels[:, :, label] += 55
                Image.fromarray(pixels).save(root / split / name / f"{each}.png")


def write_own(place: Path) -> Path:
    """Write own.yaml and its model into a folder."""
    (place / "own.yaml").write_text(OWN)
    (place / "tinymodels.py").write_text(TINY_MODEL)
    return place


def in_place(place: Path, *arguments: str) -> int:
    """Run `train.py` in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        try:
            return train.main([*arguments])
        finally:
            sys.modules.pop("tinymodels", None)


def _copy_of(name: str, write: Callable[[Path], None], factory: pytest.TempPathFactory) -> Path:
    """A copy of a folder with a finished run of `NAME.yaml`, which is trained once for all processes of the tests."""
    ours = factory.getbasetemp()
    shared = (ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours) / f"finished-{name}"
    if not shared.exists():
        place = factory.mktemp(name)
        write(place)
        assert in_place(place, "--config", f"{name}.yaml") == 0
        with contextlib.suppress(OSError):  # the other process was first
            place.rename(shared)
    return shutil.copytree(shared, factory.mktemp(name) / name)


@pytest.fixture(scope="package", name="pets")
def pets_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pets.yaml, images/ and the run runs/pets."""

    def write(place: Path) -> None:
        (place / "pets.yaml").write_text(PETS)
        write_images(place / "images")

    return _copy_of("pets", write, tmp_path_factory)


@pytest.fixture(scope="package", name="own")
def own_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with own.yaml, tinymodels.py and the run runs/own: averaged weights, statistics estimated anew."""

    return _copy_of("own", write_own, tmp_path_factory)
