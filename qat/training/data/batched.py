"""Augmentation and normalisation of a whole batch at once, for sets in memory: crop, flip, erase, cut out, normalise.

One image at a time costs about 100 microseconds of Python, as much as a small network's share of a training step. Here
a batch is one gather and a few passes. Every image has its own seed, and its random numbers are a hash of that, so that
they depend neither on the batch nor on the number of loader processes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.training.config.schema import AugmentConfig
from qat.training.data.images import ImageArray
from qat.training.data.transforms import Preprocessing, ToInput

ONE_BY_ONE = ("random_resized_crop", "affine", "trivial_augment")
"""Augmentations that interpolate, each image on a grid of its own: torchvision does these image by image."""

TOP, LEFT, FLIP, ERASE, CUT_ROW, CUT_COLUMN, TRIES = range(7)
"""Which of an image's random numbers is for what; the tries of erasing come last, `PER_TRY` for each."""

PER_TRY, MOST_TRIES = 4, 10

AREA, LOG_RATIO = (0.02, 0.33), (math.log(0.3), math.log(3.3))
"""Of an erased rectangle: its share of the image, and its height over its width; torchvision's RandomErasing."""


def uniform(seeds: Tensor, stream: int | Tensor) -> Tensor:
    """A number in [0, 1) for each seed and stream: splitmix64 (Steele et al., OOPSLA 2014) of both.

    >>> uniform(torch.tensor([1, 2, 1]), 0)
    tensor([0.3624, 0.5403, 0.3624], dtype=torch.float64)
    """
    mixed = seeds * 0x632BE59BD9B4E019 + (torch.as_tensor(stream) + 1) * -0x61C8864680B583EB  # int64 wraps around
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return _shifted(mixed ^ _shifted(mixed, 31), 11).double() * 2.0**-53


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right."""
    return torch.bitwise_and(bits >> by, 2 ** (64 - by) - 1)


class BatchTransform:
    """`train_transform` for whole batches, of `resize_size` already, without the augmentations of `ONE_BY_ONE`."""

    def __init__(self, augment: AugmentConfig, plain: Preprocessing) -> None:
        self.augment, self.size = augment, plain.image_size
        self.normalise = ToInput(plain.mean, plain.std)

    @staticmethod
    def takes(images: ImageArray, augment: AugmentConfig, plain: Preprocessing) -> bool:
        """Whether these images can be transformed in batches."""
        return min(images.images.shape[2:]) == plain.resize_size and not any(
            getattr(augment, name) for name in ONE_BY_ONE
        )

    def __call__(self, images: Tensor, seeds: Tensor) -> Tensor:
        """uint8 (N, 1 or 3, H, W) and int64 (N,) to float32 (N, 3, S, S)."""
        x = self.normalise(self._cropped(images, seeds))
        if self.augment.random_erasing:
            _erase(x, seeds, self.augment.random_erasing)
        if self.augment.cutout:
            _cut_out(x, seeds, self.augment.cutout)
        return x

    def _cropped(self, images: Tensor, seeds: Tensor) -> Tensor:
        """At random with padding, else the centre; some mirrored. One gather does both."""
        padding, size = self.augment.crop_padding, self.size
        if padding:
            images = F.pad(images, (padding,) * 4)
            top, left = (
                (uniform(seeds, stream) * (length - size + 1)).long()
                for stream, length in zip((TOP, LEFT), images.shape[2:], strict=True)
            )
        elif not self.augment.horizontal_flip:
            y, x = (round((length - size) / 2) for length in images.shape[2:])
            return images[:, :, y : y + size, x : x + size]
        else:
            top, left = (torch.full_like(seeds, round((length - size) / 2)) for length in images.shape[2:])
        steps = torch.arange(size, device=images.device)
        mirrored = (uniform(seeds, FLIP) < self.augment.horizontal_flip)[:, None]
        columns = left[:, None] + torch.where(mirrored, steps.flip(0), steps)
        rows = top[:, None] + steps
        places = (rows[:, :, None] * images.shape[3] + columns[:, None, :]).view(len(images), 1, -1)
        taken = images.flatten(2).gather(2, places.expand(-1, images.shape[1], -1))
        return taken.view(len(images), -1, size, size)


def _erase(x: Tensor, seeds: Tensor, probability: float) -> None:
    """Set a random rectangle of some images to 0, in place: the first of ten random shapes that fits."""
    height, width = x.shape[2:]
    streams = TRIES + torch.arange(MOST_TRIES * PER_TRY, device=x.device).view(MOST_TRIES, PER_TRY)
    area, ratio, row, column = uniform(seeds[:, None, None], streams).unbind(2)
    area = (AREA[0] + (AREA[1] - AREA[0]) * area) * height * width
    ratio = torch.exp(LOG_RATIO[0] + (LOG_RATIO[1] - LOG_RATIO[0]) * ratio)
    tall, wide = torch.round((area * ratio).sqrt()), torch.round((area / ratio).sqrt())
    fits = (tall < height) & (wide < width)
    first = fits.long().argmax(1, keepdim=True)
    tall, wide, row, column = (each.gather(1, first)[:, 0] for each in (tall, wide, row, column))
    erased = fits.any(1) & (uniform(seeds, ERASE) < probability)
    top, left = (row * (height - tall + 1)).floor(), (column * (width - wide + 1)).floor()
    _clear(x, top, left, torch.where(erased, tall, 0), wide)


def _cut_out(x: Tensor, seeds: Tensor, side: int) -> None:
    """Set a square with a random centre to 0 in every image, in place; at the border a part of it."""
    top, left = (
        (uniform(seeds, stream) * length).floor() - side // 2
        for stream, length in zip((CUT_ROW, CUT_COLUMN), x.shape[2:], strict=True)
    )
    sides = torch.full_like(top, side)
    _clear(x, top, left, sides, sides)


def _clear(x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> None:
    """Set a rectangle of each image to 0, in place."""
    inside = []
    for first, length, steps in ((top, height, x.shape[2]), (left, width, x.shape[3])):
        place = torch.arange(steps, device=x.device) - first[:, None]
        inside.append((place >= 0) & (place < length[:, None]))
    x.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)
