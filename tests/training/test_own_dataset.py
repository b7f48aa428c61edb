"""A data set that a user's module defines, named by `data.name: package.module:callable`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qat.training.config.schema import DATASETS
from qat.training.data import datasets
from qat.training.data.images import Dataset, ImageArray
from tests.runs.small_run import refusal, start, summary

MODULE = """
import torch
from torch import nn

from qat.training.data.images import Dataset, ImageArray

def split(count):
    labels = torch.arange(count) % 2
    noise = torch.randint(0, 40, (count, 1, 8, 8), generator=torch.Generator().manual_seed(count))
    return ImageArray((noise + 200 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

def bright_or_dark(config):
    assert config.root == "somewhere"
    return Dataset(split(64), split(32), ["dark", "bright"])

def tiny(num_classes):
    head = nn.Linear(4, num_classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

def pair(config):
    return split(64), split(32)

def missing(config):
    return open(config.root)
"""
CONFIG = """
model: {name: 'my_data:tiny'}
data: {name: 'my_data:bright_or_dark', root: somewhere, image_size: 8, batch_size: 16}
float: {epochs: 2, lr: 0.1}
qat: {epochs: 1}
run_dir: run
watch: "off"
"""


FILES = {"my_data.py": MODULE, "tiny.yaml": CONFIG}


def test_a_run_trains_and_exports_on_it(folder: Path) -> None:
    assert start() == 0
    found = summary(folder / "run")
    assert found["qat"]["top1"] == found["onnx"]["top1"] == 100.0


@pytest.mark.parametrize(("name", "facts"), [
    ("my_data:pair", ("returned tuple; it must return a qat.training.data.images.Dataset",)),
    ("my_data:missing", ("failed (FileNotFoundError: ", "'somewhere', {folder}/my_data.py:")),
])  # fmt: skip
def test_a_mistake_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, facts: tuple[str, ...]
) -> None:
    said = refusal(capsys, f"data.name='{name}'")
    assert said.startswith("data.name") and all(fact.format(folder=folder) in said for fact in facts)


IMAGES, LABELS = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1, 0])


OTHER_FORMS = [
    ({"train": IMAGES}, "train must be an ImageArray or an ImageFiles, got Tensor"),
    (
        {"val": ImageArray(IMAGES.expand(4, 4, 8, 8), LABELS)},
        "val: images must be a uint8 tensor (N, 1 or 3, H, W), got Tensor torch.uint8 (4, 4, 8, 8)",
    ),
    ({"classes": ["dark"]}, "train: labels go from 0 to 1, but classes has length 1"),
    ({"val": ImageArray(IMAGES, LABELS[:2])}, "val: labels must be an int64 tensor (4,), got Tensor torch.int64 (2,)"),
    ({"mean": (0.5,)}, "mean and std must be 3 numbers, std > 0, got (0.5,) and (0.5, 0.5, 0.5)"),
    ({"val": ImageArray(IMAGES[:0], LABELS[:0])}, "val has no images"),
]


@pytest.mark.parametrize(("changes", "problem"), OTHER_FORMS)
def test_images_and_labels_of_another_form_are_refused(changes: dict[str, Any], problem: str) -> None:
    split = ImageArray(IMAGES, LABELS)
    with pytest.raises(TypeError if "must be an ImageArray" in problem else ValueError) as raised:
        Dataset(**{"train": split, "val": split, "classes": ["dark", "bright"], **changes})
    assert str(raised.value) == f"Dataset: {problem}"


def test_every_shipped_name_has_a_builder() -> None:
    assert set(datasets._BUILDERS) == set(DATASETS)
