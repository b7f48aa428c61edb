"""From a stored image to the model's input: augmentation, geometry, normalisation.

A pipeline takes one image, either a PIL image (decoded from a file) or a uint8 tensor (from a set in memory), and
returns a normalised float32 tensor with 3 channels. Augmentation draws from torch's global CPU generator, which
`qat.training.data.loaders` seeds for each image. It is torchvision's, which takes seconds to import; validation's part,
which prediction needs too, is the same operations without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

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

    def apply(self, picture: Picture) -> Tensor:
        """Resize the shorter side, crop the centre, normalise."""
        return ToInput(self.mean, self.std)(cropped(resized(picture, self.resize_size), self.image_size))


def resized(picture: Picture, size: int) -> Picture:
    """The picture, or uint8 pictures (..., C, H, W), with a shorter side of so many pixels: torchvision's Resize."""
    before = _width_and_height(picture)
    width, height = (int(size * side / min(before)) for side in before)
    if (width, height) == before:
        return picture
    if isinstance(picture, Image.Image):
        return picture.resize((width, height), Image.Resampling.BILINEAR)
    images = picture.reshape(-1, *picture.shape[-3:])
    larger = F.interpolate(images, (height, width), mode="bilinear", antialias=True)
    return larger.reshape(*picture.shape[:-2], height, width)


def cropped(picture: Picture, size: int) -> Picture:
    """A square out of the middle of a picture that is at least as large: torchvision's CenterCrop."""
    left, top = (round((side - size) / 2) for side in _width_and_height(picture))
    if isinstance(picture, Image.Image):
        return picture.crop((left, top, left + size, top + size))
    return picture[..., top : top + size, left : left + size]


def _width_and_height(picture: Picture) -> tuple[int, int]:
    return picture.size if isinstance(picture, Image.Image) else (picture.shape[-1], picture.shape[-2])


def pixels_of(image: Image.Image) -> Tensor:
    """An 8-bit RGB image as a tensor (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class ToInput:
    """A picture as float32 (3, H, W), or uint8 images (..., C, H, W), normalised: (pixel/255 - mean) / std."""

    def __init__(self, mean: Channels, std: Channels) -> None:
        self.mean = torch.tensor(mean).mul(255).view(3, 1, 1)
        self.std = torch.tensor(std).mul(255).view(3, 1, 1)

    def __call__(self, picture: Picture) -> Tensor:
        """Normalise one image; a single channel is repeated."""
        pixels: Tensor = picture if isinstance(picture, Tensor) else pixels_of(picture)
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
    """The training pipeline: crop (random, or as in validation), augmentation, normalisation."""
    from torchvision.transforms import InterpolationMode, v2  # late, since it takes seconds

    size = plain.image_size
    bilinear = InterpolationMode.BILINEAR
    steps: list[Callable[..., object]] = []
    steps.append(
        v2.RandomResizedCrop(size, antialias=True)
        if augment.random_resized_crop
        else partial(resized, size=plain.resize_size)
    )
    steps.append(
        v2.RandomCrop(size, padding=augment.crop_padding) if augment.crop_padding else partial(cropped, size=size)
    )
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
    """Resize `images`, uint8 (N, C, H, W), once; the first step of each pipeline then has nothing to do.

    A set that would grow beyond MAX_RESIZED_BYTES is returned unchanged; it gives the same batches, more slowly.
    """
    count, channels, height, width = images.shape
    short, long = sorted((height, width))
    grown = count * channels * resize_size * (resize_size * long // short)
    if short == resize_size or grown > MAX_RESIZED_BYTES:
        return images
    return torch.cat([torch.as_tensor(resized(part, resize_size)) for part in torch.split(images, 1024)])
