"""Loaders for the splits of a data set, in an order that depends only on the seed and the epoch.

Each training image gets its own random number, drawn together with the order, that seeds its augmentation. So an epoch
is the same after a resume, for any number of loader processes, and whatever else draws random numbers.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.data import DataLoader, Sampler

from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data import datasets
from qat.training.data.datasets import logger, seeded_generator
from qat.training.data.images import ImageArray, Images
from qat.training.data.transforms import Preprocessing, resized_up_front
from qat.training.data.views import Batch, Sample, SampleKey, TransformedImages, View, plain_view, training_view
from qat.training.errors import UserError


class EpochOrder(Sampler[SampleKey]):
    """(index, augmentation seed) for each image: of given indices, or of a number in a new random order every epoch."""

    def __init__(self, indices: Sequence[int] | int, seed: int = 0) -> None:
        self.indices = indices
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.indices if isinstance(self.indices, int) else len(self.indices)

    def __iter__(self) -> Iterator[SampleKey]:
        if not isinstance(self.indices, int):
            return ((index, 0) for index in self.indices)
        generator = seeded_generator(self.seed, "order", self.epoch)
        indices = torch.randperm(self.indices, generator=generator)
        seeds = torch.randint(2**32, (self.indices,), generator=generator)
        return zip(indices.tolist(), seeds.tolist(), strict=True)


class Loader:
    """Batches of float32 images (N, 3, H, W) and int64 labels (N,); UserError if an image cannot be read."""

    def __init__(self, batches: DataLoader[Batch], order: EpochOrder) -> None:
        self._batches = batches
        self._order = order

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch (0 is the first) whose order and augmentation the next iteration uses."""
        self._order.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self._batches
        except UserError as error:  # from a loader process, torch puts the process and its traceback before
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None


@dataclass(frozen=True)
class Data:
    """A data set, ready for training."""

    train: Loader
    """Shuffled and augmented; call `set_epoch` before each epoch."""
    val: Loader
    """All validation images, always in the same order."""
    calibration: Callable[[int], Loader]
    """`calibration(batches)`: at most that many batches of training images, chosen by the seed and preprocessed as for
    validation. A longer calibration begins with the batches of a shorter one."""
    classes: list[str]
    """The name of each label."""
    image_shape: tuple[int, int, int]
    """Shape of one image: 3, height, width."""
    preprocessing: Preprocessing
    """What validation does to an image."""
    contents: dict[str, dict[str, int | str]]
    """For `train` and `val` the number of images, and their `digest`."""


def load_data(config: DataConfig, seed: int, device: torch.device, channels_last: bool) -> Data:
    """Open the data set that `config` names and make its loaders; training images that fit move to a CUDA device."""
    dataset = datasets.build_dataset(config, seed)
    preprocessing = Preprocessing(
        image_size=config.image_size,
        resize_size=config.resize_size or config.image_size,
        mean=config.mean or dataset.mean,
        std=config.std or dataset.std,
        resized_by="torch" if isinstance(dataset.val, ImageArray) else "pillow",
    )
    train = _limited(dataset.train, config.limit_train, "train")
    val = _limited(dataset.val, config.limit_val, "val")
    contents: dict[str, dict[str, int | str]] = {
        split: {"images": len(images.labels), "digest": images.digest()}
        for split, images in (("train", train), ("val", val))
    }
    val = _prepared(val, preprocessing.resize_size)
    if not config.augment.random_resized_crop:
        train = _prepared(train, preprocessing.resize_size)
    train_view = training_view(train, config, preprocessing, device)
    val_view, calibration_view = (plain_view(images, AugmentConfig(), preprocessing) for images in (val, train))
    workers = _default_workers(train) if config.workers is None else config.workers
    make = partial(_loader, workers=workers, pinned=device.type == "cuda", channels_last=channels_last)
    chosen = torch.randperm(len(train.labels), generator=seeded_generator(seed, "calibration")).tolist()

    def calibration(batches: int) -> Loader:
        order = EpochOrder(chosen[: batches * config.batch_size])
        return make(calibration_view, order, config.batch_size, persistent=False)

    return Data(
        train=make(train_view, EpochOrder(len(train_view), seed), config.batch_size, drop_last=True),
        val=make(val_view, EpochOrder(range(len(val_view))), config.eval_batch_size or 2 * config.batch_size),
        calibration=calibration,
        classes=dataset.classes,
        image_shape=(3, config.image_size, config.image_size),
        preprocessing=preprocessing,
        contents=contents,
    )


def _limited(images: Images, limit: int | None, split: str) -> Images:
    """Return a random choice of `limit` images; it is the same for every seed, so that runs can be compared."""
    count = len(images.labels)
    if limit is None:
        return images
    if limit >= count:
        logger.warning("data.limit_%s: %d has no effect; there are %d images", split, limit, count)
        return images
    chosen = torch.randperm(count, generator=seeded_generator(0, f"limit_{split}"))[:limit]
    return images.subset(chosen.sort().values)


def _prepared(images: Images, resize_size: int) -> Images:
    if not isinstance(images, ImageArray):
        return images
    return ImageArray(resized_up_front(images.images, resize_size), images.labels)


def _default_workers(images: Images) -> int:
    if isinstance(images, ImageArray):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)


def _loader(
    view: View,
    order: EpochOrder,
    batch_size: int,
    *,
    workers: int,
    pinned: bool,
    channels_last: bool,
    drop_last: bool = False,
    persistent: bool = True,
) -> Loader:
    """Make a loader; `drop_last` drops an incomplete last batch unless it is the only one."""
    batches: DataLoader[Batch] = DataLoader(
        view,
        batch_size,
        sampler=order,
        num_workers=workers,
        collate_fn=partial(_collate, channels_last=channels_last),
        pin_memory=pinned and (isinstance(view, TransformedImages) or view.on_host),
        drop_last=drop_last and len(order) >= batch_size,
        persistent_workers=persistent and workers > 0,
        generator=torch.Generator(),  # otherwise each epoch would draw from the global generator
    )
    return Loader(batches, order)


def _collate(samples: list[Sample] | Batch, channels_last: bool) -> Batch:
    images, labels = samples if isinstance(samples, tuple) else map(torch.stack, zip(*samples, strict=True))
    return images.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format), labels
