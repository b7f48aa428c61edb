"""A split's images as the model's inputs: one at a time, or a whole batch at once, on a CUDA device if they fit."""

import logging
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data.batched import BatchTransform
from qat.training.data.images import ImageArray, Images
from qat.training.data.transforms import Preprocessing, Transform, is_random, train_transform

logger = logging.getLogger("qat")

Sample: TypeAlias = tuple[Tensor, Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]
SampleKey: TypeAlias = tuple[int, int]


class TransformedImages(Dataset[Sample]):
    """A split's images as the model's inputs; `random` transforms draw from torch's global CPU generator."""

    def __init__(self, images: Images, transform: Transform, random: bool) -> None:
        self.images = images
        self.transform = transform
        self.random = random

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitems__(self, keys: list[SampleKey]) -> list[Sample]:
        """Return the samples of a whole batch; torch's loader calls this where it is defined."""
        state, threads = torch.default_generator.get_state(), torch.get_num_threads()
        # One image is too small for several threads: waiting for them made `affine` up to 15 times slower.
        torch.set_num_threads(1)
        try:
            return [self._sample(index, seed) for index, seed in keys]
        finally:  # in the main process, the model uses both as well
            torch.set_num_threads(threads)
            torch.default_generator.set_state(state)

    def _sample(self, index: int, seed: int) -> Sample:
        if self.random:
            torch.default_generator.manual_seed(seed)
        return self.transform(self.images.picture(index)), self.images.labels[index]


class BatchedImages(Dataset[Batch]):
    """A split's images in memory as the model's inputs, a whole batch at once, on the device where the images are."""

    def __init__(self, images: ImageArray, transform: BatchTransform) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitems__(self, keys: list[SampleKey]) -> Batch:
        """Return a batch; torch's loader calls this where it is defined."""
        indices, seeds = torch.tensor(keys).to(self.images.labels.device, non_blocking=True).unbind(1)
        return self.transform(self.images.images[indices], seeds), self.images.labels[indices]

    @property
    def on_host(self) -> bool:
        """Whether the batches are on the CPU."""
        return self.images.labels.device.type == "cpu"


View: TypeAlias = TransformedImages | BatchedImages

MOST_OF_A_DEVICE = 0.25
"""The share of a device's free memory that a training set may take there."""


def training_view(images: Images, config: DataConfig, plain: Preprocessing, device: torch.device) -> View:
    """The training images; a set in memory moves to the CUDA device, where augmentation then costs the host nothing."""
    view = plain_view(images, config.augment, plain)
    if device.type != "cuda" or config.workers or isinstance(view, TransformedImages):
        return view
    size, free = view.images.images.nbytes, torch.cuda.mem_get_info(device)[0]
    if size > MOST_OF_A_DEVICE * free:
        logger.warning(
            "data: %.1f GB of training images stay in host memory, since %s has %.1f GB free and they may take %.0f %%",
            size / 1e9, device, free / 1e9, 100 * MOST_OF_A_DEVICE,
        )  # fmt: skip
        return view
    return BatchedImages(view.images.to(device), view.transform)


def plain_view(images: Images, augment: AugmentConfig, plain: Preprocessing) -> View:
    """The images of a split where they are, in batches if their augmentation can be."""
    if isinstance(images, ImageArray) and BatchTransform.takes(images, augment, plain):
        return BatchedImages(images, BatchTransform(augment, plain))
    return TransformedImages(images, train_transform(augment, plain), is_random(augment))
