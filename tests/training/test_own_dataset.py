"""A data set that a user's module defines, named by `data.name: package.module:callable`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import train
from qat.training.config.schema import DATASETS
from qat.training.data import datasets

MODULE = """
import torch
from torch import nn

from qat.training.data.images import Dataset, ImageArray

def split(count, channels=1):
    labels = torch.arange(count) % 2
    noise = torch.randint(0, 40, (count, channels, 8, 8), generator=torch.Generator().manual_seed(count))
    return ImageArray((noise + 200 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

def bright_or_dark(config):
    assert config.root == "somewhere"
    return Dataset(split(64), split(32), ["dark", "bright"])

def tiny(num_classes):
    head = nn.Linear(4, num_classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

number = 3

def pair(config):
    return split(64), split(32)

def floats(config):
    wrong = ImageArray(split(64).images.float(), split(64).labels)
    return Dataset(wrong, split(32), ["dark", "bright"])

def four_channels(config):
    return Dataset(split(64), split(32, 4), ["dark", "bright"])

def too_few_classes(config):
    return Dataset(split(64), split(32), ["dark"])

def too_few_labels(config):
    return Dataset(split(64), ImageArray(split(32).images, split(16).labels), ["dark", "bright"])

def bare(config):
    return Dataset(split(64).images, split(32).images, ["dark", "bright"])

def grey(config):
    return Dataset(split(64), split(32), ["dark", "bright"], mean=(0.5,))

def empty(config):
    return Dataset(split(64), split(0), ["dark", "bright"])

def missing(config):
    return open(config.root)
"""
CONFIG = """
model: {name: 'my_data:tiny'}
data: {name: 'my_data:bright_or_dark', root: somewhere, image_size: 8, batch_size: 16}
float: {epochs: 2, lr: 0.1}
qat: {epochs: 1}
run_dir: run
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_data.py").write_text(MODULE)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_data", None)


def test_a_run_trains_and_exports_on_it(folder: Path) -> None:
    assert train.main(["--config", "tiny.yaml"]) == 0
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["qat"]["top1"] == summary["onnx"]["top1"] == 100.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "my_date:pair",
            "data.name: no module 'my_date' for 'my_date:pair', neither in the current folder '{folder}' nor installed",
        ),
        ("my_data:", "data.name: 'my_data:' is incomplete; write package.module:callable"),
        ("my_data:pare", "data.name: 'my_data' has no 'pare'; did you mean 'pair'?"),
        ("my_data:number", "data.name: 'my_data:number' is int; it must be callable"),
        (
            "my_data:pair",
            "data.name: 'my_data:pair' returned tuple; it must return a qat.training.data.images.Dataset",
        ),
        (
            "my_data:bare",
            "data.name: 'my_data:bare' failed (TypeError: Dataset: train must be an ImageArray or an ImageFiles, got"
            " Tensor, {folder}/my_data.py:{line})",
        ),
        (
            "my_data:floats",
            "data.name: 'my_data:floats' failed (ValueError: Dataset: train: images must be a uint8 tensor"
            " (N, 1 or 3, H, W), got Tensor torch.float32 (64, 1, 8, 8), {folder}/my_data.py:{line})",
        ),
        (
            "my_data:four_channels",
            "data.name: 'my_data:four_channels' failed (ValueError: Dataset: val: images must be a uint8 tensor"
            " (N, 1 or 3, H, W), got Tensor torch.uint8 (32, 4, 8, 8), {folder}/my_data.py:{line})",
        ),
        (
            "my_data:too_few_classes",
            "data.name: 'my_data:too_few_classes' failed (ValueError: Dataset: train: labels go from 0 to 1, but"
            " classes has length 1, {folder}/my_data.py:{line})",
        ),
        (
            "my_data:too_few_labels",
            "data.name: 'my_data:too_few_labels' failed (ValueError: Dataset: val: labels must be an int64 tensor"
            " (32,), got Tensor torch.int64 (16,), {folder}/my_data.py:{line})",
        ),
        (
            "my_data:grey",
            "data.name: 'my_data:grey' failed (ValueError: Dataset: mean and std must be 3 numbers, std > 0, got (0.5,)"
            " and (0.5, 0.5, 0.5), {folder}/my_data.py:{line})",
        ),
        (
            "my_data:empty",
            "data.name: 'my_data:empty' failed (ValueError: Dataset: val has no images, {folder}/my_data.py:{line})",
        ),
        (
            "my_data:missing",
            "data.name: 'my_data:missing' failed (FileNotFoundError: [Errno 2] No such file or directory: 'somewhere',"
            " {folder}/my_data.py:{line})",
        ),
        (
            "bright_or_dark",
            "data.name='bright_or_dark': expected 'digits', 'imagefolder', 'cifar10', 'cifar100', 'mnist',"
            " 'fashion_mnist', 'imagenet', 'npz', 'fake' or 'package.module:callable', got 'bright_or_dark'",
        ),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str], name: str, sentence: str) -> None:
    function = f"def {name.partition(':')[2]}(config):"
    line = MODULE.count("\n", 0, MODULE.find("    return", max(MODULE.find(function), 0))) + 1
    assert train.main(["--config", "tiny.yaml", f"data.name='{name}'"]) == 2
    assert capsys.readouterr().err.strip() == sentence.format(folder=folder, line=line)
    assert not (folder / "run").exists()


def test_every_shipped_name_has_a_builder() -> None:
    assert set(datasets._BUILDERS) == set(DATASETS)


def test_downloading_is_for_the_shipped_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config", "tiny.yaml", "data.download=true"]) == 2
    assert capsys.readouterr().err.strip() == (
        "data.download: true has no effect with data.name 'my_data:bright_or_dark'; only cifar10, cifar100, mnist,"
        " fashion_mnist can be downloaded"
    )
