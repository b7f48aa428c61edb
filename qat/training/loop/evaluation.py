"""Evaluation of a model on a split, its BatchNorm statistics, and warnings."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat.batch_norm import batch_norms, copied_statistics, is_young, reestimate_batch_norm, restore_statistics
from qat.collectives import of_all_ranks, rank_count
from qat.contexts import evaluating
from qat.training.config.stages import StageConfig
from qat.training.errors import UserError
from qat.training.loop.stage import Batch, Batches, StageRun
from qat.training.run.logging import progress_bar
from qat.training.tasks.known import CLASSIFICATION
from qat.training.tasks.task import Task


@dataclass(frozen=True)
class Evaluation:
    """Results on a split."""

    score: float  # percent, as the task counts it
    loss: float  # mean over the images
    count: int  # images
    chance: float  # score of the most common label everywhere
    by_class: tuple[float, ...] = ()  # of masks and boxes


def evaluate(
    model: nn.Module,
    loader: Batches,
    device: torch.device,
    *,
    channels_last: bool = True,
    progress: str | None = None,
    forward: Callable[[Tensor], object] | None = None,
    task: Task = CLASSIFICATION,
) -> Evaluation:
    """Run a model over a split in eval mode.

    Its mode and torch's random state are restored. A `forward` is called in the model's place, a faster way through it.
    Each rank brings its share of the split, and all get the results of the whole.
    """
    total, images_seen = torch.zeros((), dtype=torch.float64, device=device), 0
    counts, task = list[Tensor](), task.bound(model)
    # Not inference_mode: a tensor that a module keeps from it could not be used in training afterwards.
    with (
        evaluating(model),
        torch.no_grad(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        progress_bar(loader, progress) as bar,
    ):
        for batch in bar:
            images, labels = to_device(batch, device, channels_last=channels_last)
            answers = task.answers((forward or model)(images), images)
            total += task.total_loss(answers, labels).double()
            counts.append(task.counts(answers, labels))
            images_seen += len(labels)
    ranks = of_all_ranks((float(total), images_seen, task.merged(counts).cpu() if counts else None))
    count, counted = sum(seen for _, seen, _ in ranks), [each for _, _, each in ranks if each is not None]
    if not counted:
        raise UserError("data: the split to evaluate on has no images")
    score = task.score(task.merged(counted))
    return Evaluation(score.value, sum(loss for loss, *_ in ranks) / count, count, score.chance, score.by_class)


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
    kept if they clearly lower the loss on plain training images; those that have seen too few batches are no choice,
    for ranges behind them fit no step of QAT. Frozen statistics stay. A resumed run draws the same
    random numbers again.
    """
    choice, frozen_from = run.stage.bn_reestimate, getattr(run.stage, "freeze_bn_epoch", None)
    tried = choice == "auto" and not any(of_all_ranks(any(map(is_young, batch_norms(run.model)))))
    unwanted = choice == "never" or (tried and epochs == 0)
    if unwanted or run.sample is None or not batch_norms(run.model):
        return ""
    if frozen_from is not None and epochs > frozen_from:  # training used them too
        return ""
    if tried:
        layout, kept = run.config.channels_last, copied_statistics(run.model)
        before = evaluate(run.model, run.sample, run.device, channels_last=layout, task=run.config.task).loss
        _reestimate(run, epochs, len(run.sample))
        trial = evaluate(run.model, run.sample, run.device, channels_last=layout, task=run.config.task).loss
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


def warnings_about(
    name: str, key: str, stage: StageConfig, evaluation: Evaluation, start: float | None, task: Task
) -> list[str]:
    """Warn of a result at chance level, or worse than `start`, the score before."""
    advice = f"; try a lower {key} (now {stage.lr:g}) or more epochs" if stage.epochs else ""
    found = f"{name}: val {task.title} {evaluation.score:.2f} %"
    chance = evaluation.chance + _deviation(evaluation.chance, evaluation.count)
    if evaluation.chance == 100 or evaluation.score <= chance < 100:  # else there are too few images to tell
        luck = f", with luck up to {chance:.2f} %" * (evaluation.score > evaluation.chance)
        return [
            f"{found} is at chance level: the same answer for all {evaluation.count} images gives"
            f" {evaluation.chance:.2f} %{luck}{advice}"
        ]
    if start is not None:
        both = (start + evaluation.score) / 2
        if evaluation.score < start - math.sqrt(2) * _deviation(both, evaluation.count):
            return [f"{found} is below the {start:.2f} % that it started from{advice}"]
    return []


def _deviation(percent: float, count: int) -> float:
    share = percent / 100
    return 100 * SIGMAS * math.sqrt(share * (1 - share) / count)
