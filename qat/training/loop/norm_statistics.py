"""BatchNorm's running statistics before an evaluation: estimated anew where they lag behind the weights."""

import math
from collections.abc import Iterator

from torch import Tensor

from qat.batch_norm import batch_norms, copied_statistics, reestimate_batch_norm, restore_statistics
from qat.training.loop.evaluation import Batches, evaluate, to_device
from qat.training.loop.stage import StageRun

WORSE = 0.05
"""By this share, and at least by `LEAST`, the loss has to fall for the new statistics to be kept."""

LEAST = 0.01


def settle_statistics(run: StageRun, epochs: int) -> str:
    """Estimate the statistics anew if `bn_reestimate` says so and they were not frozen; return a note for the log.

    With `auto`, the new statistics are kept if they clearly lower the loss on the sample of training images: evaluation
    and training disagreed. Nothing is drawn at random, so a resumed run decides the same.

    Args:
        run: the stage, with its model as it will be evaluated.
        epochs: how many epochs the model was trained; untrained it stays as it is, unless `always` is asked for.
    """
    choice, frozen_from = run.stage.bn_reestimate, getattr(run.stage, "freeze_bn_epoch", None)
    unwanted = choice == "never" or (choice == "auto" and epochs == 0)
    if unwanted or run.sample is None or not batch_norms(run.model):
        return ""
    if frozen_from is not None and epochs > frozen_from:  # training and evaluation use the same
        return ""
    before = _loss(run, run.sample)
    kept = copied_statistics(run.model)
    count = reestimate_batch_norm(run.model, _images(run, run.sample))
    after = _loss(run, run.sample)
    if choice == "auto" and math.isfinite(before) and not before - after > max(WORSE * before, LEAST):
        restore_statistics(run.model, kept)
        return ""
    return f"statistics of {count} BatchNorms estimated anew, loss on training images {before:.3f} -> {after:.3f}"


def _loss(run: StageRun, batches: Batches) -> float:
    return evaluate(run.model, batches, run.device, channels_last=run.config.channels_last).loss


def _images(run: StageRun, batches: Batches) -> Iterator[Tensor]:
    """The images, without a last batch of one: a single vector of features has no variance."""
    for batch in batches:
        images, labels = to_device(batch, run.device, channels_last=run.config.channels_last)
        if len(labels) > 1 or run.config.data.batch_size == 1:
            yield images
