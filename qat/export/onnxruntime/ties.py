"""`explain_differences`: predictions of a file that are not its model's, followed integer by integer."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qat.contexts import evaluating
from qat.export.agreement import equal_predictions
from qat.export.onnxruntime.session import open_session
from qat.export.onnxruntime.verification import LayerComparison, answers
from qat.inputs import Batch, as_batches
from qat.integers.following import LayerDifference


@dataclass
class Differences:
    """What is behind the predictions of a file that are not its model's.

    Attributes:
        predictions: how many were compared, of the output that differs most.
        differing: how many of them are not the model's.
        unexplained: how many of these do not follow from near-ties.
        layers: in the batches with such predictions, every layer's integers, given the same integers before it, and a
            fusion behind what is unexplained (`LayerDifference.fused`).
    """

    predictions: int = 0
    differing: int = 0
    unexplained: int = 0
    layers: list[LayerDifference] = field(default_factory=list)


def explain_differences(
    path: str | os.PathLike[str], model: torch.nn.Module, batches: Iterable[Batch], *, enough: int | None = None
) -> Differences:
    """Find out why predictions of the file are not the model's: near-ties, or another function.

    Two runtimes add float32 numbers in another order. A value that lies on a tie between two integers is then rounded
    up by one and down by the other, and a network may amplify that to another class. Both are right. So each batch with
    a prediction that differs is run again, and every quantizer's integers are read. A prediction is explained if

    - no integer differs otherwise than by a near-tie (`LayerDifference.beyond_ties`), each layer given ONNX Runtime's,
    - the model, continuing from ONNX Runtime's last integers, predicts what ONNX Runtime predicts,
    - and that is what the file predicts where nobody reads its integers, when the runtime may fuse more.

    A runtime that computes another function fails the first or the last.

    Args:
        path, model, batches: as for `qat.verify_onnx`.
        enough: stop after the batch with which so many predictions are unexplained; None: look at all batches.

    Raises:
        TypeError: if the path is not a path, the model no module, or a batch none.
        ValueError: if there is no batch, or the file is not the model's.
    """
    given = as_batches(explain_differences, model, batches)
    session, comparison = open_session(path), LayerComparison(path, model)
    counts: Tensor | None = None
    layers: list[LayerDifference] = []
    with evaluating(model), torch.no_grad():
        for batch in given:
            inputs, (ours, theirs, _) = answers("explain_differences", session, model, batch)
            differ = [~equal for equal in _equal(zip(ours, theirs, strict=True))]
            unexplained = differ
            if any(bool(each.any()) for each in differ):
                found, followed = comparison.follow(inputs)
                layers = _sums([*layers, *found])
                if not any(layer.beyond_ties for layer in found):
                    read = [both[1] for both in followed]
                    explained = zip(_equal(followed), _equal(zip(read, theirs, strict=True)), strict=True)
                    unexplained = [each & ~(a & b) for each, (a, b) in zip(differ, explained, strict=True)]
                    if any(bool(each.any()) for each in unexplained):
                        layers = _sums([*layers, *comparison.fused(inputs, read)])
            both = zip(differ, unexplained, strict=True)
            new = torch.tensor([[a.numel(), int(a.sum()), int(b.sum())] for a, b in both])
            counts = new if counts is None else counts + new
            if enough is not None and int(counts[:, 2].max()) >= enough:
                break
    if counts is None:
        raise ValueError("explain_differences: batches is empty; at least one batch is needed to compare anything")
    rows = counts.tolist()
    predictions, differing, unexplained = max(rows, key=lambda row: (row[2] / row[0], row[1] / row[0]))
    return Differences(predictions, differing, unexplained, layers)


def _equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Which predictions are equal, output by output; an output without values has none."""
    return [equal_predictions([both]) for both in pairs if both[0].numel()]


def _sums(layers: list[LayerDifference]) -> list[LayerDifference]:
    """The differences of several batches, added layer by layer."""
    found: dict[Any, LayerDifference] = {}
    for each in layers:
        old = found.setdefault((each.name, each.fused), replace(each, elements=0, differing=0, beyond_ties=0))
        sums = {key: getattr(old, key) + getattr(each, key) for key in ("elements", "differing", "beyond_ties")}
        found[each.name, each.fused] = replace(each, largest=max(old.largest, each.largest), **sums)
    return list(found.values())
