"""Models and images of the deployment benchmark."""

import torch
import torchvision
from torch import Tensor, nn

import qat

SIZES = {"vit_b_16": 224}
"""Height and width of the images; 112 for the others."""


def size_of(name: str) -> int:
    """Height and width of its images."""
    return SIZES.get(name, 112)


def float_model(name: str, images: Tensor) -> nn.Module:
    """A model of torchvision in evaluation mode; the statistics of its BatchNorms are those of the images."""
    model: nn.Module = getattr(torchvision.models, name)(weights=None).eval()
    qat.reestimate_batch_norm(model, [images])
    return model


def random_images(name: str, batch: int = 16) -> Tensor:
    """Normally distributed pixels."""
    return torch.randn(batch, 3, size_of(name), size_of(name))


def prepared_model(model: nn.Module, images: Tensor, target: str = "onnxruntime") -> nn.Module:
    """The model prepared and calibrated, in evaluation mode."""
    prepared = qat.prepare(model, qat.QuantRecipe(target=target), images[:2])
    qat.calibrate(prepared, [images])
    return prepared.eval()
