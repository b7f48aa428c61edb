"""Evaluation of a classifier on a split; moving batches to the device and reading logits, which training also uses."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.collectives import of_all_ranks
from qat.contexts import evaluating
from qat.training.errors import UserError
from qat.training.run.logging import progress_bar


class Batches(Protocol):
    """Batches for evaluation: (images NCHW float32, labels int64) on the CPU, ideally in pinned memory."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


class TrainBatches(Batches, Protocol):
    """Batches for training, in an order that depends on the epoch."""

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Choose the epoch, which determines the order and the augmentation, and the batch that a pass begins with."""


@dataclass(frozen=True)
class Evaluation:
    """Results on a split: top1 and the share of the most common label in percent, mean cross-entropy, and images."""

    top1: float
    loss: float
    count: int
    most_common: float


def evaluate(
    model: nn.Module,
    loader: Batches,
    device: torch.device,
    *,
    channels_last: bool = True,
    progress: str | None = None,
    forward: Callable[[Tensor], Any] | None = None,
) -> Evaluation:
    """Run a model over a split in eval mode; its mode and torch's random state are restored afterwards.

    A `forward` is called in the model's place, a faster way through it.

    Each rank brings its share of the split, and all get the results of the whole.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    truths: list[Tensor] = []
    # Not inference_mode, because a tensor that a module keeps from it could not be used in training afterwards.
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


def to_device(batch: Any, device: torch.device, *, channels_last: bool) -> tuple[Tensor, Tensor]:
    """Return images and labels on the device; from pinned memory they are copied asynchronously."""
    images, labels = batch
    layout = torch.channels_last if channels_last and images.dim() == 4 else torch.preserve_format
    return images.to(device, non_blocking=True, memory_format=layout), labels.to(device, non_blocking=True)


def split_output(output: Any, batch_size: int) -> tuple[Tensor, list[Tensor]]:
    """Split a classifier's output into its logits and the logits of its auxiliary classifiers.

    The output is a tensor, a dict with the key logits or out, or a tuple or list, whose `.logits` or first entry is
    used. Other tensors of the same shape are auxiliary logits (GoogLeNet and Inception v3 in training).
    """
    logits: Any = output
    others: list[Any] = []
    if isinstance(output, Mapping):
        logits, others = output.get("logits", output.get("out")), list(output.values())
    elif isinstance(output, tuple | list) and output:
        logits, others = getattr(output, "logits", output[0]), list(output)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != batch_size:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise UserError(f"model: it must return logits of shape ({batch_size}, classes), but returned {got}")
    auxiliary = [
        other for other in others if isinstance(other, Tensor) and other is not logits and other.shape == logits.shape
    ]
    return logits, auxiliary
