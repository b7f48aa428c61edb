"""Evaluation of a classifier on a split, its BatchNorm statistics, and warnings."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.batch_norm import batch_norms, copied_statistics, reestimate_batch_norm, restore_statistics
from qat.collectives import of_all_ranks, rank_count
from qat.contexts import evaluating
from qat.training.config.stages import StageConfig
from qat.training.errors import UserError
from qat.training.loop.stage import Batch, Batches, StageRun
from qat.training.model import split_output
from qat.training.run.logging import progress_bar


@dataclass(frozen=True)
class Evaluation:
    """Results on a split."""

    top1: float  # percent
    loss: float  # mean cross-entropy
    count: int  # images
    most_common: float  # percent of the images that have the most common label


def evaluate(
    model: nn.Module,
    loader: Batches,
    device: torch.device,
    *,
    channels_last: bool = True,
    progress: str | None = None,
    forward: Callable[[Tensor], object] | None = None,
) -> Evaluation:
    """Run a model over a split in eval mode.

    Its mode and torch's random state are restored. A `forward` is called in the model's place, a faster way through it.
    Each rank brings its share of the split, and all get the results of the whole.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    truths: list[Tensor] = []
    # Not inference_mode: a tensor that a module keeps from it could not be used in training afterwards.
    with (
        evaluating(model),
        torch.no_grad(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        progress_bar(loader, progress) as bar,
    ):
        for batch in bar:
            images, labels = to_device(batch, device, channels_last=channels_last)
            logits = split_output((forward or model)(images), len(labels))[0].float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack((loss.double(), (logits.argmax(dim=1) == labels).sum().double()))
            truths.append(labels)
    labels_of_all, results = Counter[int](), torch.zeros(2, dtype=torch.float64)
    for its_sums, its_labels in of_all_ranks((sums.cpu(), Counter(torch.cat(truths).tolist() if truths else ()))):
        results += its_sums
        labels_of_all += its_labels
    count = labels_of_all.total()
    if not count:
        raise UserError("data: the split to evaluate on has no images")
    total_loss, correct = results.tolist()
    return Evaluation(100 * correct / count, total_loss / count, count, 100 * max(labels_of_all.values()) / count)


def to_device(batch: Batch, device: torch.device, *, channels_last: bool) -> Batch:
    """Copy images and labels to the device, asynchronously from pinned memory."""
    images, labels = batch
    layout = torch.channels_last if channels_last and images.dim() == 4 else torch.preserve_format
    return images.to(device, non_blocking=True, memory_format=layout), labels.to(device, non_blocking=True)


MIN_GAIN = 0.05  # new statistics are kept if the loss falls by more than this share
MIN_ABSOLUTE_GAIN = 0.01  # and by more than this
IMAGES = 5000  # of a new estimate: on a MobileNetV2 at 4 bits 1,000 cost half a point, 5,000 a tenth
EPOCH_OFFSET = 2**20  # added to an epoch's number, so that no epoch of training has the same order and crops


def settle_statistics(run: StageRun, epochs: int) -> str:
    """Estimate BatchNorm's statistics anew if `bn_reestimate` says so; return a note.

    The images are training batches as training sees them, augmented and mixed: a network is normalised in training by
    their statistics, and those of plain images are of another function (MobileNetV2 at 4 bits: 2.9 points worse, since
    the crops of CIFAR-10 have black borders). With `auto`, a trial of a few batches comes first, and new statistics are
    kept if they clearly lower the loss on plain training images. Frozen statistics stay. A resumed run draws the same
    random numbers again.
    """
    choice, frozen_from = run.stage.bn_reestimate, getattr(run.stage, "freeze_bn_epoch", None)
    unwanted = choice == "never" or (choice == "auto" and epochs == 0)
    if unwanted or run.sample is None or not batch_norms(run.model):
        return ""
    if frozen_from is not None and epochs > frozen_from:  # training used them too
        return ""
    if choice == "auto":
        layout, kept = run.config.channels_last, copied_statistics(run.model)
        before = evaluate(run.model, run.sample, run.device, channels_last=layout).loss
        _reestimate(run, epochs, len(run.sample))
        trial = evaluate(run.model, run.sample, run.device, channels_last=layout).loss
        if math.isfinite(before) and not before - trial > max(MIN_GAIN * before, MIN_ABSOLUTE_GAIN):
            restore_statistics(run.model, kept)
            return ""
    count = _reestimate(run, epochs, math.ceil(IMAGES / run.config.data.batch_size))
    return f"statistics of {count} BatchNorms estimated anew"


def _reestimate(run: StageRun, epochs: int, count: int) -> int:
    def images() -> Iterator[Tensor]:
        for batch in itertools.islice(run.train, count):
            x, labels = to_device(batch, run.device, channels_last=run.config.channels_last)
            if len(labels) > 1 or run.config.data.batch_size == rank_count():  # one image has no variance
                yield x if run.mixing is None else run.mixing(x, labels)[0]

    run.train.set_epoch(EPOCH_OFFSET + run.epochs_before + epochs)
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(epochs)  # for the mixing
        return reestimate_batch_norm(run.model, images())


SIGMAS = 2.0  # standard deviations from which a difference counts, given the size of the validation split


def warnings_about(name: str, key: str, stage: StageConfig, evaluation: Evaluation, start: float | None) -> list[str]:
    """Warn of a result at chance level, or worse than `start`, the top1 before."""
    advice = f"; try a lower {key} (now {stage.lr:g}) or more epochs" if stage.epochs else ""
    found = f"{name}: val top1 {evaluation.top1:.2f} %"
    chance = evaluation.most_common + _deviation(evaluation.most_common, evaluation.count)
    if evaluation.most_common == 100 or evaluation.top1 <= chance < 100:  # else there are too few images to tell
        luck = f", with luck up to {chance:.2f} %" * (evaluation.top1 > evaluation.most_common)
        return [
            f"{found} is at chance level: the same answer for all {evaluation.count} images gives"
            f" {evaluation.most_common:.2f} %{luck}{advice}"
        ]
    if start is not None:
        both = (start + evaluation.top1) / 2
        if evaluation.top1 < start - math.sqrt(2) * _deviation(both, evaluation.count):
            return [f"{found} is below the {start:.2f} % that it started from{advice}"]
    return []


def _deviation(percent: float, count: int) -> float:
    share = percent / 100
    return 100 * SIGMAS * math.sqrt(share * (1 - share) / count)
