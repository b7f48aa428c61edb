"""From a stored image to the model's input: augmentation, geometry, normalisation.

A pipeline takes one image, either a PIL image (decoded from a file) or a uint8 tensor (from a set in memory), and
returns a normalised float32 tensor with 3 channels. Augmentation draws from torch's global CPU generator, which
`qat.training.data.loaders` seeds for each image.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from qat.training.config.schema import AugmentConfig

Picture: TypeAlias = Image.Image | Tensor
Channels: TypeAlias = tuple[float, float, float]
Transform: TypeAlias = Callable[[Picture], Tensor]

MAX_RESIZED_BYTES = 512 * 2**20
"""Sets in memory are resized up front only if the result has at most this many bytes."""


@dataclass(frozen=True)
class Preprocessing:
    """What validation does to an image, in plain values that are kept with the weights.

    Args:
        image_size: side of the square that is cropped from the centre, the model's input, in pixels.
        resize_size: length that the image's shorter side is resized to before, in pixels.
        mean, std: per channel (red, green, blue), of pixels in [0, 1]; the input is (pixel/255 - mean) / std.
        interpolation: how the image is resized: bilinear, with antialiasing.
        resized_by: "pillow" for images from files, "torch" for sets in memory. Where an image is made smaller, their
            pixels may differ by one level of 255.
    """

    image_size: int
    resize_size: int
    mean: Channels
    std: Channels
    interpolation: Literal["bilinear"] = "bilinear"
    resized_by: Literal["pillow", "torch"] = "pillow"

    def pipeline(self) -> Transform:
        """Resize the shorter side, crop the centre, normalise."""
        crop = v2.CenterCrop(self.image_size)
        pipeline: Transform = v2.Compose([_resize(self.resize_size), crop, ToInput(self.mean, self.std)])
        return pipeline


class ToInput:
    """Turn a picture into a float32 tensor (3, H, W), normalised per channel: (pixel/255 - mean) / std.

    A uint8 tensor may have an axis of images before.
    """

    def __init__(self, mean: Channels, std: Channels) -> None:
        self.mean = torch.tensor(mean).mul(255).view(3, 1, 1)
        self.std = torch.tensor(std).mul(255).view(3, 1, 1)

    def __call__(self, picture: Picture) -> Tensor:
        """Normalise one image; a single channel is repeated."""
        pixels: Tensor = picture if isinstance(picture, Tensor) else v2.functional.pil_to_tensor(picture)
        coloured = pixels.expand(*pixels.shape[:-3], 3, -1, -1)
        mean, std = self.mean.to(pixels.device), self.std.to(pixels.device)
        return coloured.to(torch.float32, copy=True).sub_(mean).div_(std)


class Cutout:
    """Set a square with a random centre to 0, the mean; at the border a part of it (arXiv:1708.04552)."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, image: Tensor) -> Tensor:
        """Cut out of one normalised image (3, H, W), in place."""
        rows, columns = (
            slice(max(0, first), max(0, first + self.side))
            for length in image.shape[1:]
            for first in [int(torch.randint(length, ())) - self.side // 2]
        )
        image[:, rows, columns] = 0
        return image


def train_transform(augment: AugmentConfig, plain: Preprocessing) -> Transform:
    """Return the training pipeline: the augmentation, with the normalisation of validation.

    Without `random_resized_crop`, images are resized as for validation. They are then cropped at random with
    `crop_padding`, otherwise at the centre.
    """
    size = plain.image_size
    bilinear = InterpolationMode.BILINEAR
    steps: list[Callable[..., object]] = []
    steps.append(
        v2.RandomResizedCrop(size, antialias=True) if augment.random_resized_crop else _resize(plain.resize_size)
    )
    steps.append(v2.RandomCrop(size, padding=augment.crop_padding) if augment.crop_padding else v2.CenterCrop(size))
    if augment.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(augment.horizontal_flip))
    if augment.affine:
        steps.append(v2.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1), interpolation=bilinear))
    if augment.trivial_augment:
        steps.append(v2.TrivialAugmentWide(interpolation=bilinear))
    steps.append(ToInput(plain.mean, plain.std))
    if augment.random_erasing:
        steps.append(v2.RandomErasing(augment.random_erasing))
    if augment.cutout:
        steps.append(Cutout(augment.cutout))
    pipeline: Transform = v2.Compose(steps)
    return pipeline


def is_random(augment: AugmentConfig) -> bool:
    """Whether any augmentation is on, that is, whether the training pipeline draws random numbers."""
    return any(augment.model_dump().values())


def resized_up_front(images: Tensor, resize_size: int) -> Tensor:
    """Resize `images`, uint8 (N, C, H, W), once, as the first step of each pipeline would in every epoch.

    The pipelines keep that step, which then has nothing to do. A set that would grow beyond MAX_RESIZED_BYTES is
    returned unchanged; it gives the same batches, more slowly.
    """
    count, channels, height, width = images.shape
    short, long = sorted((height, width))
    grown = count * channels * resize_size * (resize_size * long // short)
    if short == resize_size or grown > MAX_RESIZED_BYTES:
        return images
    resize = _resize(resize_size)
    return torch.cat([resize(part) for part in torch.split(images, 1024)])


def _resize(size: int) -> v2.Resize:
    return v2.Resize(size, antialias=True)
