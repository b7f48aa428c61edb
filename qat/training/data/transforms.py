"""Preprocessing of images: augmentation, geometry, normalisation.

A pipeline takes a PIL image (from a file) or a uint8 tensor (from a set in memory), and returns a normalised float32
tensor with 3 channels. Augmentation is torchvision's, which takes seconds to import; validation does without. Random
numbers come from torch's global CPU generator, seeded for each image.

For sets in memory `BatchTransform` does a whole batch: one by one, images cost about 100 microseconds each in Python,
as much as a small network's share of a step. Its random numbers are a hash of each image's own seed, so that they
depend neither on the batch nor on the number of loader processes.
"""

import math
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
MAX_RESIZED_BYTES = 512 * 2**20  # of a set in memory that is resized up front


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of validation images, in plain values that are kept with weights.

    Args:
        image_size: side of the square that is cropped from the centre, the model's input, in pixels.
        resize_size: length that the image's shorter side is resized to before, in pixels.
        mean, std: per channel (red, green, blue), of pixels in [0, 1]; the input is (pixel/255 - mean) / std.
        interpolation: how the image is resized: bilinear, with antialiasing.
        resized_by: "pillow" for images from files, "torch" for sets in memory. Where an image is made smaller, their
            pixels may differ by one level of 255.
        stretched: the whole image is resized to the square, whatever its shape, and nothing is cropped; for boxes.
    """

    image_size: int
    resize_size: int
    mean: Channels
    std: Channels
    interpolation: Literal["bilinear"] = "bilinear"
    resized_by: Literal["pillow", "torch"] = "pillow"
    stretched: bool = False

    def apply(self, picture: Picture) -> Tensor:
        whole = resized(picture, self.resize_size, self.stretched)
        return ToInput(self.mean, self.std)(cropped(whole, self.image_size))


def resized(picture: Picture, size: int, stretched: bool = False) -> Picture:
    """Resize the shorter side (or both) of a picture, or uint8 (..., C, H, W), as torchvision."""
    before = _width_and_height(picture)
    width, height = (size if stretched else int(size * side / min(before)) for side in before)
    if (width, height) == before:
        return picture
    if isinstance(picture, Image.Image):
        return picture.resize((width, height), Image.Resampling.BILINEAR)
    images = picture.reshape(-1, *picture.shape[-3:])
    larger = F.interpolate(images, (height, width), mode="bilinear", antialias=True)
    return larger.reshape(*picture.shape[:-2], height, width)


def cropped(picture: Picture, size: int) -> Picture:
    """Crop a square from the centre of a larger picture, as torchvision's CenterCrop."""
    left, top = (round((side - size) / 2) for side in _width_and_height(picture))
    if isinstance(picture, Image.Image):
        return picture.crop((left, top, left + size, top + size))
    return picture[..., top : top + size, left : left + size]


def _width_and_height(picture: Picture) -> tuple[int, int]:
    return picture.size if isinstance(picture, Image.Image) else (picture.shape[-1], picture.shape[-2])


def pixels_of(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class ToInput:
    """Normalisation of a picture, or uint8 (..., C, H, W): (pixel/255 - mean) / std."""

    def __init__(self, mean: Channels, std: Channels) -> None:
        self.mean = torch.tensor(mean).mul(255).view(3, 1, 1)
        self.std = torch.tensor(std).mul(255).view(3, 1, 1)

    def __call__(self, picture: Picture) -> Tensor:
        pixels: Tensor = picture if isinstance(picture, Tensor) else pixels_of(picture)
        coloured = pixels.expand(*pixels.shape[:-3], 3, -1, -1)
        mean, std = self.mean.to(pixels.device), self.std.to(pixels.device)
        return coloured.to(torch.float32, copy=True).sub_(mean).div_(std)

    def undone(self, images: Tensor) -> Tensor:
        """Return the uint8 pixels of normalised images (..., 3, H, W) on the CPU."""
        return images.mul(self.std).add(self.mean).round().clamp(0, 255).to(torch.uint8)


def cutout(image: Tensor, side: int) -> Tensor:
    """Set a square with a random centre to 0, the mean (arXiv:1708.04552)."""
    top, left = (int(torch.randint(length, ())) - side // 2 for length in image.shape[1:])
    # At the border, only a part of the square lies inside.
    image[:, max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = 0
    return image


def train_transform(augment: AugmentConfig, plain: Preprocessing) -> Transform:
    """Build the training pipeline: crop (or as in validation), augment, normalise."""
    from torchvision.transforms import InterpolationMode, v2  # late, since it takes seconds

    size, padding, bilinear = plain.image_size, augment.crop_padding, InterpolationMode.BILINEAR
    steps: list[Callable[..., object]] = [
        v2.RandomResizedCrop(size) if augment.random_resized_crop else partial(resized, size=plain.resize_size),
        v2.RandomCrop(size, padding=padding) if padding else partial(cropped, size=size),
    ]
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
        steps.append(partial(cutout, side=augment.cutout))
    pipeline: Transform = v2.Compose(steps)
    return pipeline


def resized_up_front(images: Tensor, resize_size: int) -> Tensor:
    """Resize uint8 (N, C, H, W) once, so that pipelines need not.

    A set that would grow beyond MAX_RESIZED_BYTES is returned unchanged; it gives the same batches, more slowly.
    """
    count, channels, height, width = images.shape
    short, long = sorted((height, width))
    grown = count * channels * resize_size * (resize_size * long // short)
    if short == resize_size or grown > MAX_RESIZED_BYTES:
        return images
    return torch.cat([torch.as_tensor(resized(part, resize_size)) for part in torch.split(images, 1024)])


# These interpolate, each image on a grid of its own: torchvision does them image by image.
ONE_BY_ONE = ("random_resized_crop", "affine", "trivial_augment")
# Streams of an image's random numbers. The tries of erasing come last, `PER_TRY` streams for each.
TOP, LEFT, FLIP, ERASE, CUT_ROW, CUT_COLUMN, TRIES = range(7)
PER_TRY, MOST_TRIES = 4, 10
# An erased rectangle, as in torchvision's RandomErasing: its share of the image, and log(height / width).
AREA, LOG_RATIO = (0.02, 0.33), (math.log(0.3), math.log(3.3))


def uniform(seeds: Tensor, stream: int | Tensor) -> Tensor:
    """Return a number in [0, 1) for each seed and stream.

    It is the splitmix64 (Steele et al., OOPSLA 2014) of both.

    >>> uniform(torch.tensor([1, 2, 1]), 0)
    tensor([0.3624, 0.5403, 0.3624], dtype=torch.float64)
    """

    def shifted(bits: Tensor, by: int) -> Tensor:  # to the right, without the sign
        return torch.bitwise_and(bits >> by, 2 ** (64 - by) - 1)

    mixed = seeds * 0x632BE59BD9B4E019 + (torch.as_tensor(stream) + 1) * -0x61C8864680B583EB  # int64 wraps around
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ shifted(mixed, shift)) * factor
    return shifted(mixed ^ shifted(mixed, 31), 11).double() * 2.0**-53


class BatchTransform:
    """Training pipeline of whole batches, without the augmentations of `ONE_BY_ONE`."""

    def __init__(self, augment: AugmentConfig, plain: Preprocessing) -> None:
        self.augment, self.size = augment, plain.image_size
        self.normalise = ToInput(plain.mean, plain.std)

    @staticmethod
    def supports(images: Tensor, augment: AugmentConfig, plain: Preprocessing) -> bool:
        """Return True if these images, (N, C, H, W), can be transformed in batches."""
        return min(images.shape[2:]) == plain.resize_size and not any(getattr(augment, name) for name in ONE_BY_ONE)

    # From uint8 (N, 1 or 3, H, W) and int64 (N,) to float32 (N, 3, S, S).
    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        x = self.normalise(self._cropped(images, seeds))
        if self.augment.random_erasing:
            _erase(x, seeds, self.augment.random_erasing)
        if self.augment.cutout:
            _cut_out(x, seeds, self.augment.cutout)
        return x

    def _cropped(self, images: Tensor, seeds: Tensor) -> Tensor:
        padding, size = self.augment.crop_padding, self.size
        if padding:
            images = F.pad(images, (padding,) * 4)
            top, left = (
                (uniform(seeds, stream) * (length - size + 1)).long()
                for stream, length in zip((TOP, LEFT), images.shape[2:], strict=True)
            )
        elif not self.augment.horizontal_flip:
            return torch.as_tensor(cropped(images, size))
        else:
            top, left = (torch.full_like(seeds, round((length - size) / 2)) for length in images.shape[2:])
        steps = torch.arange(size, device=images.device)
        mirrored = (uniform(seeds, FLIP) < self.augment.horizontal_flip)[:, None]
        columns = left[:, None] + torch.where(mirrored, steps.flip(0), steps)
        rows = top[:, None] + steps
        # One gather crops and mirrors.
        places = (rows[:, :, None] * images.shape[3] + columns[:, None, :]).view(len(images), 1, -1)
        taken = images.flatten(2).gather(2, places.expand(-1, images.shape[1], -1))
        return taken.view(len(images), -1, size, size)


def _erase(x: Tensor, seeds: Tensor, probability: float) -> None:
    height, width = x.shape[2:]
    streams = TRIES + torch.arange(MOST_TRIES * PER_TRY, device=x.device).view(MOST_TRIES, PER_TRY)
    area, ratio, row, column = uniform(seeds[:, None, None], streams).unbind(2)
    area = (AREA[0] + (AREA[1] - AREA[0]) * area) * height * width
    ratio = torch.exp(LOG_RATIO[0] + (LOG_RATIO[1] - LOG_RATIO[0]) * ratio)
    tall, wide = torch.round((area * ratio).sqrt()), torch.round((area / ratio).sqrt())
    fits = (tall < height) & (wide < width)
    # The first try that fits counts, as torchvision draws until one does.
    first = fits.long().argmax(1, keepdim=True)
    tall, wide, row, column = (each.gather(1, first)[:, 0] for each in (tall, wide, row, column))
    erased = fits.any(1) & (uniform(seeds, ERASE) < probability)
    top, left = (row * (height - tall + 1)).floor(), (column * (width - wide + 1)).floor()
    _clear(x, top, left, torch.where(erased, tall, 0), wide)


def _cut_out(x: Tensor, seeds: Tensor, side: int) -> None:
    top, left = (
        (uniform(seeds, stream) * length).floor() - side // 2
        for stream, length in zip((CUT_ROW, CUT_COLUMN), x.shape[2:], strict=True)
    )
    sides = torch.full_like(top, side)
    _clear(x, top, left, sides, sides)


def _clear(x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> None:
    inside = []
    for first, length, steps in ((top, height, x.shape[2]), (left, width, x.shape[3])):
        place = torch.arange(steps, device=x.device) - first[:, None]
        inside.append((place >= 0) & (place < length[:, None]))
    x.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)
