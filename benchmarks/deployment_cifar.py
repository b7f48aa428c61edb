"""ResNet-20 on CIFAR-10: published float weights, images to calibrate on, and the validation split."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.cifar_resnet import resnet20
from qat.training.config.schema import DataConfig
from qat.training.data.loaders import Data, load_data
from qat.training.model.weights import load_weights

SUBJECT = "ResNet-20, CIFAR-10"
CALIBRATION_BATCHES = 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The published weights were trained with ImageNet's figures."""


@dataclass(frozen=True)
class Split:
    """Images of one kind with their labels."""

    images: Tensor
    labels: Tensor


def float_resnet20(weights: Path) -> nn.Module:
    """The model with the weights of a file, in evaluation mode."""
    model = resnet20()
    load_weights(model, str(weights), "resnet20", "--weights")
    return model.eval()


def cifar(images: Path) -> tuple[Tensor, Split]:
    """The images to calibrate on, and the validation split."""
    config = DataConfig(name="npz", root=str(images), image_size=32, mean=MEAN, std=STD)
    data = load_data(config, 0, torch.device("cpu"), channels_last=False)
    return torch.cat([batch for batch, _ in data.calibration(CALIBRATION_BATCHES)]), validation(data)


def validation(data: Data) -> Split:
    """The whole validation split of a data set."""
    images, labels = zip(*data.val, strict=True)
    return Split(torch.cat(images), torch.cat(labels))
