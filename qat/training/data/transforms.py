"""From a stored image to the model's input: augmentation, geometry, normalisation.

A pipeline takes one image, either a PIL image (decoded from a file) or a uint8 tensor (from a set in memory), and
returns a normalised float32 tensor with 3 channels. Augmentation draws from torch's global CPU generator, which
`qat.training.data.loaders` seeds for each image.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from qat.training.config.schema import AugmentConfig, DataConfig

Picture: TypeAlias = Image.Image | Tensor
Channels: TypeAlias = tuple[float, float, float]
Transform: TypeAlias = Callable[[Picture], Tensor]

MAX_RESIZED_BYTES = 512 * 2**20
"""Sets in memory are resized up front only if the result has at most this many bytes."""


class ToInput:
    """Turn a picture into a float32 tensor (3, H, W), normalised per channel: (pixel/255 - mean) / std."""

    def __init__(self, mean: Channels, std: Channels) -> None:
        self.mean = torch.tensor(mean).mul(255).view(3, 1, 1)
        self.std = torch.tensor(std).mul(255).view(3, 1, 1)

    def __call__(self, picture: Picture) -> Tensor:
        """Normalise one image; a single channel is repeated."""
        pixels: Tensor = picture if isinstance(picture, Tensor) else v2.functional.pil_to_tensor(picture)
        return pixels.expand(3, -1, -1).to(torch.float32, copy=True).sub_(self.mean).div_(self.std)


def eval_transform(config: DataConfig, mean: Channels, std: Channels) -> Transform:
    """Return the validation pipeline: resize the shorter side, crop the centre, normalise."""
    pipeline: Transform = v2.Compose([_resize(config), v2.CenterCrop(config.image_size), ToInput(mean, std)])
    return pipeline


def train_transform(config: DataConfig, mean: Channels, std: Channels) -> Transform:
    """Return the training pipeline: `config.augment` with the same normalisation.

    Without `random_resized_crop`, images are resized as for validation. They are then cropped at random with
    `crop_padding`, otherwise at the centre.
    """
    augment, size = config.augment, config.image_size
    bilinear = InterpolationMode.BILINEAR
    steps: list[Callable[..., object]] = []
    steps.append(v2.RandomResizedCrop(size, antialias=True) if augment.random_resized_crop else _resize(config))
    steps.append(v2.RandomCrop(size, padding=augment.crop_padding) if augment.crop_padding else v2.CenterCrop(size))
    if augment.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(augment.horizontal_flip))
    if augment.affine:
        steps.append(v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1), interpolation=bilinear))
    if augment.trivial_augment:
        steps.append(v2.TrivialAugmentWide(interpolation=bilinear))
    steps.append(ToInput(mean, std))
    if augment.random_erasing:
        steps.append(v2.RandomErasing(augment.random_erasing))
    pipeline: Transform = v2.Compose(steps)
    return pipeline


def is_random(augment: AugmentConfig) -> bool:
    """Whether any augmentation is on, that is, whether the training pipeline draws random numbers."""
    return any(augment.model_dump().values())


def resized_up_front(images: Tensor, config: DataConfig) -> Tensor:
    """Resize `images`, uint8 (N, C, H, W), once, as the first step of each pipeline would in every epoch.

    The pipelines keep that step, which then has nothing to do. A set that would grow beyond MAX_RESIZED_BYTES is
    returned unchanged; it gives the same batches, more slowly.
    """
    count, channels, height, width = images.shape
    short, long = sorted((height, width))
    target = config.resize_size or config.image_size
    if short == target or count * channels * target * (target * long // short) > MAX_RESIZED_BYTES:
        return images
    resize = _resize(config)
    return torch.cat([resize(part) for part in torch.split(images, 1024)])


def _resize(config: DataConfig) -> v2.Resize:
    return v2.Resize(config.resize_size or config.image_size, antialias=True)
