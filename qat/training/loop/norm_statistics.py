"""BatchNorm's running statistics before an evaluation: estimated anew where they lag behind the weights."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from qat.batch_norm import batch_norms, copied_statistics, reestimate_batch_norm, restore_statistics
from qat.collectives import rank_count
from qat.training.loop.evaluation import Batches, evaluate, to_device
from qat.training.loop.stage import StageRun

MIN_GAIN = 0.05
"""New statistics are kept if the loss falls by at least this share, and by at least `MIN_ABSOLUTE_GAIN`."""

MIN_ABSOLUTE_GAIN = 0.01

IMAGES = 5000
"""Of a new estimate. Of a MobileNetV2 at 4 bits 1,000 cost half a point, 5,000 0.1."""

EPOCH_OFFSET = 2**20
"""Added to an epoch's number, for an order and for crops that no epoch of training has."""


def settle_statistics(run: StageRun, epochs: int) -> str:
    """Estimate the statistics anew if `bn_reestimate` says so and they were not frozen; return a note for the log.

    The images are training batches as training sees them, augmented and mixed: a network is normalised in training by
    their statistics, and those of plain images are of another function (MobileNetV2 at 4 bits: 2.9 points worse, since
    the crops of CIFAR-10 have black borders). With `auto`, a trial of a few batches comes first, and new statistics are
    kept if they clearly lower the loss on plain training images. A resumed run draws the same random numbers again.
    """
    choice, frozen_from = run.stage.bn_reestimate, getattr(run.stage, "freeze_bn_epoch", None)
    unwanted = choice == "never" or (choice == "auto" and epochs == 0)
    if unwanted or run.sample is None or not batch_norms(run.model):
        return ""
    if frozen_from is not None and epochs > frozen_from:  # training and evaluation use the same
        return ""
    if choice == "auto":
        before, kept = _loss(run, run.sample), copied_statistics(run.model)
        _reestimate(run, epochs, len(run.sample))
        trial = _loss(run, run.sample)
        if math.isfinite(before) and not before - trial > max(MIN_GAIN * before, MIN_ABSOLUTE_GAIN):
            restore_statistics(run.model, kept)
            return ""
    count = _reestimate(run, epochs, math.ceil(IMAGES / run.config.data.batch_size))
    return f"statistics of {count} BatchNorms estimated anew"


def _loss(run: StageRun, batches: Batches) -> float:
    return evaluate(run.model, batches, run.device, channels_last=run.config.channels_last).loss


def _reestimate(run: StageRun, epochs: int, batches: int) -> int:
    """From so many training batches, or all of an epoch if that has fewer."""
    run.train.set_epoch(EPOCH_OFFSET + run.epochs_before + epochs)
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(epochs)  # of the mixing
        return reestimate_batch_norm(run.model, _images(run, itertools.islice(run.train, batches)))


def _images(run: StageRun, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """The images as a step gets them, without a last batch of one: a single vector of features has no variance."""
    for batch in batches:
        images, labels = to_device(batch, run.device, channels_last=run.config.channels_last)
        if len(labels) > 1 or run.config.data.batch_size == rank_count():
            yield images if run.mixing is None else run.mixing(images, labels)[0]
