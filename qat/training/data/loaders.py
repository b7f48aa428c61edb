"""Loaders of a data set, in an order that depends only on seed and epoch.

Each training image gets its own random number, drawn together with the order, that seeds its augmentation. So an epoch
is the same after a resume, for any number of loader processes, and whatever else draws random numbers.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from qat.collectives import rank, rank_count
from qat.text import unprintable
from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data import datasets
from qat.training.data.boxes import BoxedTransform
from qat.training.data.datasets import seeded_generator
from qat.training.data.images import ImageArray, Images
from qat.training.data.masks import MaskedTransform
from qat.training.data.transforms import (
    BatchTransform,
    Picture,
    Preprocessing,
    Transform,
    resized_up_front,
    train_transform,
)
from qat.training.errors import UserError
from qat.training.ranks import ranks_here
from qat.training.tasks.task import Kind

logger = logging.getLogger("qat")

Sample: TypeAlias = tuple[Tensor, Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]
SampleKey: TypeAlias = tuple[int, int]


def labelled(transform: Transform, picture: Picture, label: Tensor) -> Sample:
    """Return an image, transformed alone, and its label."""
    return transform(picture), label


class TransformedImages(Dataset[Sample]):
    """Images of a split, transformed one by one with torch's global generator."""

    def __init__(self, images: Images, transform: Callable[[Picture, Tensor], Sample], random: bool) -> None:
        self.images, self.transform, self.random = images, transform, random

    # torch's loader calls it with the keys of a whole batch.
    def __getitems__(self, keys: list[SampleKey]) -> list[Sample]:
        state, threads = torch.default_generator.get_state(), torch.get_num_threads()
        # One image is too small for several threads: waiting for them made `affine` up to 15 times slower.
        torch.set_num_threads(1)
        samples = []
        try:
            for index, seed in keys:
                if self.random:
                    torch.default_generator.manual_seed(seed)
                samples.append(self.transform(*self.images.sample(index)))
            return samples
        finally:  # without loader processes, the model uses both too
            torch.set_num_threads(threads)
            torch.default_generator.set_state(state)


class BatchedImages(Dataset[Batch]):
    """Images of a split in memory, transformed in batches on their device."""

    def __init__(self, images: ImageArray, transform: BatchTransform) -> None:
        self.images, self.transform = images, transform

    def __getitems__(self, keys: list[SampleKey]) -> Batch:
        indices, seeds = torch.tensor(keys).to(self.images.labels.device, non_blocking=True).unbind(1)
        return self.transform(self.images.images[indices], seeds), self.images.labels[indices]


View: TypeAlias = TransformedImages | BatchedImages
MOST_OF_A_DEVICE = 0.25  # share of a device's free memory that a training set may take


def training_view(images: Images, config: DataConfig, plain: Preprocessing, device: torch.device) -> View:
    """Return the augmented training images, on a CUDA device if they fit."""
    view = plain_view(images, config.augment, plain)
    if device.type != "cuda" or config.workers or isinstance(view, TransformedImages):
        return view
    size, free = view.images.images.nbytes, torch.cuda.mem_get_info(device)[0]
    if size > MOST_OF_A_DEVICE * free:
        share = f"{device} has {free / 1e9:.1f} GB free and they may take {100 * MOST_OF_A_DEVICE:.0f} %"
        logger.warning("data: %.1f GB of training images stay in host memory, since %s", size / 1e9, share)
        return view
    return BatchedImages(view.images.to(device), view.transform)


def plain_view(images: Images, augment: AugmentConfig, plain: Preprocessing) -> View:
    """Return the images of a split where they are, in batches if possible."""
    alone = images.kind == "labels"
    if isinstance(images, ImageArray) and alone and BatchTransform.supports(images.images, augment, plain):
        return BatchedImages(images, BatchTransform(augment, plain))
    moved = BoxedTransform if images.kind == "boxes" else MaskedTransform
    transform = partial(labelled, train_transform(augment, plain)) if alone else moved(augment, plain)
    return TransformedImages(images, transform, random=any(augment.model_dump().values()))


class EpochOrder(Sampler[SampleKey]):
    """Pairs (index, augmentation seed): given indices, or n in a new order each epoch."""

    def __init__(self, indices: Sequence[int] | int, seed: int = 0) -> None:
        self.indices, self.seed, self.epoch = indices, seed, 0

    def __len__(self) -> int:
        return self.indices if isinstance(self.indices, int) else len(self.indices)

    def __iter__(self) -> Iterator[SampleKey]:
        if not isinstance(self.indices, int):
            return ((index, 0) for index in self.indices)
        generator = seeded_generator(self.seed, "order", self.epoch)
        indices = torch.randperm(self.indices, generator=generator)
        seeds = torch.randint(2**32, (self.indices,), generator=generator)
        return zip(indices.tolist(), seeds.tolist(), strict=True)


class RankBatches(Sampler[list[SampleKey]]):
    """This rank's shares of the batches of an order.

    A batch has `size` images; of n in it, the share is rank*n/count to (rank+1)*n/count. With `whole`, an incomplete
    last batch is left out, unless it is the only one, and all shares are of one size: a gradient is the mean over the
    ranks. With `alone`, all of a batch is rank 0's share.
    """

    def __init__(self, order: EpochOrder, size: int, whole: bool = False, alone: bool = False) -> None:
        self.order, self.size, self.whole, self.alone = order, size, whole, alone
        self.first = 0  # first batch of a pass: a resumed epoch has trained on those before it

    def __len__(self) -> int:
        batches, left = divmod(len(self.order), self.size)
        return max(batches, min(left // rank_count(), 1)) if self.whole else batches + bool(left)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        keys, count = list(self.order), 1 if self.alone else rank_count()
        for number in range(self.first, len(self)):
            batch = keys[number * self.size : (number + 1) * self.size]
            if self.whole:
                batch = batch[: len(batch) // count * count]
            share = batch[rank() * len(batch) // count : (rank() + 1) * len(batch) // count]
            if share:  # the last batch may have fewer images than there are ranks
                yield share


class Loader:
    """Batches of images (N, 3, H, W) and labels, as `Task` has them, shared as in `RankBatches`."""

    def __init__(
        self,
        view: View,
        order: EpochOrder,
        batch_size: int,
        *,
        workers: int,
        pinned: bool,
        channels_last: bool,
        whole: bool = False,
        alone: bool = False,
        persistent: bool = True,
    ) -> None:
        self._order, self._shares = order, RankBatches(order, batch_size, whole, alone)
        self._batches: DataLoader[Batch] = DataLoader(
            view,
            batch_sampler=self._shares,
            num_workers=workers,
            collate_fn=partial(_collate, channels_last=channels_last),
            pin_memory=pinned and not (isinstance(view, BatchedImages) and view.images.labels.is_cuda),
            persistent_workers=persistent and workers > 0,
            generator=torch.Generator(),  # else each epoch would draw from the global generator
        )

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Choose the epoch (0 is the first) of order and augmentation, and a first batch."""
        self._order.epoch, self._shares.first = epoch, first

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self._batches
        except UserError as error:  # torch prepends a loader process's name and traceback
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None


@dataclass(frozen=True)
class Data:
    """A data set, ready for training."""

    train: Loader  # shuffled and augmented; call `set_epoch` before each epoch
    val: Loader  # all validation images, always in the same order
    # `calibration(batches, alone)`: at most that many batches of training images, chosen by the seed and preprocessed
    # as for validation; `alone`: all for rank 0. A longer calibration begins with the batches of a shorter one.
    calibration: Callable[..., Loader]
    classes: list[str]  # the name of each label
    kind: Kind  # what the data set says of each image
    image_shape: tuple[int, int, int]  # 3, height, width
    preprocessing: Preprocessing  # what validation does to an image
    contents: dict[str, dict[str, int | str]]  # for `train` and `val` the number of images, and their `digest`


def load_data(config: DataConfig, seed: int, device: torch.device, channels_last: bool, kind: Kind = "masks") -> Data:
    if config.batch_size % (count := rank_count()):
        what = f"{config.batch_size} is of all ranks together, and {count} cannot share it evenly"
        raise UserError(f"data.batch_size: {what}; use a multiple of {count}")
    dataset = datasets.build_dataset(config, seed, kind)
    if wrong := unprintable(dataset.classes):
        raise UserError(f"data: the class {wrong}")
    if (boxed := dataset.val.kind == "boxes") and config.resize_size is not None:
        raise UserError(f"data.resize_size: {config.resize_size} has no meaning for boxes; leave it out")
    preprocessing = Preprocessing(
        image_size=config.image_size,
        resize_size=config.resize_size or config.image_size,
        mean=config.mean or dataset.mean,
        std=config.std or dataset.std,
        resized_by="torch" if isinstance(dataset.val, ImageArray) else "pillow",
        stretched=boxed,
    )
    train = _limited(dataset.train, config.limit_train, "train")
    val = _limited(dataset.val, config.limit_val, "val")
    contents: dict[str, dict[str, int | str]] = {
        split: {"images": len(images), "digest": images.digest()} for split, images in (("train", train), ("val", val))
    }
    if isinstance(val, ImageArray) and val.kind == "labels":
        val = ImageArray(resized_up_front(val.images, preprocessing.resize_size), val.labels)
    if isinstance(train, ImageArray) and train.kind == "labels" and not config.augment.random_resized_crop:
        train = ImageArray(resized_up_front(train.images, preprocessing.resize_size), train.labels)
    train_view = training_view(train, config, preprocessing, device)
    val_view, calibration_view = (plain_view(images, AugmentConfig(), preprocessing) for images in (val, train))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usual = 0 if isinstance(train, ImageArray) else min(8, max(1, cores // ranks_here()))
    workers = usual if config.workers is None else config.workers
    make = partial(Loader, workers=workers, pinned=device.type == "cuda", channels_last=channels_last)
    chosen = torch.randperm(len(train), generator=seeded_generator(seed, "calibration")).tolist()

    def calibration(batches: int, alone: bool = False) -> Loader:
        order = EpochOrder(chosen[: batches * config.batch_size])
        return make(calibration_view, order, config.batch_size, persistent=False, alone=alone)

    return Data(
        train=make(train_view, EpochOrder(len(train), seed), config.batch_size, whole=True),
        val=make(val_view, EpochOrder(range(len(val))), config.eval_batch_size or 2 * config.batch_size),
        calibration=calibration,
        classes=dataset.classes,
        kind=train.kind,
        image_shape=(3, config.image_size, config.image_size),
        preprocessing=preprocessing,
        contents=contents,
    )


def _limited(images: Images, limit: int | None, split: str) -> Images:
    count = len(images)
    if limit is not None and limit >= count:
        logger.warning("data.limit_%s: %d has no effect; there are %d images", split, limit, count)
    if limit is None or limit >= count:
        return images
    # The same choice for every seed, so that runs can be compared.
    chosen = torch.randperm(count, generator=seeded_generator(0, f"limit_{split}"))[:limit]
    return images.subset(chosen.sort().values)


def _collate(samples: list[Sample] | Batch, channels_last: bool) -> Batch:
    if isinstance(samples, tuple):
        images, labels = samples
    else:
        stacked, each = zip(*samples, strict=True)
        images, boxes = torch.stack(stacked), each[0].is_floating_point()
        labels = pad_sequence(list(each), batch_first=True, padding_value=-1.0) if boxes else torch.stack(each)
    return images.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format), labels
