"""`explain_differences`: traces differing outputs of a file back to single integers."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from qat.contexts import evaluating
from qat.export.agreement import MIN_AGREEMENT, Follow, Pair, Run, answers, close_predictions, equal_predictions
from qat.export.litert.engines import TorchFile, litert_following
from qat.export.onnxruntime.session import open_session, run_session
from qat.export.onnxruntime.verification import LayerComparison
from qat.inputs import Batch, Inputs, as_batches
from qat.integers.following import LayerDifference

B = TypeVar("B", bound=Batch)
Fused = Callable[[Inputs, list[Tensor]], list[LayerDifference]]
"""Function from inputs, and the answers while all integers are read, to layers that differ while none is read."""


@dataclass
class Differences:
    """The answers of a file that differ from its model's, and their reasons.

    Attributes:
        predictions: how many were compared, of the output that differs most.
        differing: how many of them are not the model's.
        unexplained: how many are not, or have values that are off (`Verification.close`), and not by near-ties.
        layers: in the batches with such predictions, every layer's integers, given the same integers before it, and a
            fusion behind what is unexplained (`LayerDifference.fused`).
    """

    predictions: int = 0
    differing: int = 0
    unexplained: int = 0
    layers: list[LayerDifference] = field(default_factory=list)

    @property
    def explained(self) -> bool:
        """True if near-ties explain all but as many as may differ."""
        return self.unexplained <= allowed_of(self.predictions)


def allowed_of(predictions: int) -> int:
    """Return how many predictions may differ without an explanation."""
    return int((1 - MIN_AGREEMENT) * predictions)


def explain_differences(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    batches: Iterable[Batch],
    *,
    enough: int | None = None,
    default_session: bool = False,
    engine: str | None = None,
    classes: bool = True,
) -> Differences:
    """Find out why a file's answers differ: near-ties, or another function.

    Two runtimes add float32 numbers in another order. A value that lies on a tie between two integers is then rounded
    up by one and down by the other, and a network may amplify that to another class, or to values that are off by more
    than `Verification.close` allows. Both are right. So each batch with such a prediction is run again, and every
    quantizer's integers are read. A prediction is explained if

    - some integers differ, each layer given the runtime's, and all by near-ties (`LayerDifference.beyond_ties`),
    - the model, continuing from the runtime's last integers, gives the classes and values that the runtime gives,
    - and those are what the file gives where nobody reads its integers, when the runtime may fuse more.

    A runtime that computes another function fails the first or the last.

    Args:
        path, model, batches, default_session, classes: as for `qat.verify_onnx`.
        enough: stop after the batch with which so many predictions are unexplained; None: look at all batches.
        engine: what runs a .tflite file, as for `verify_litert`; it may round any integer to its neighbour.

    Raises:
        TypeError: if the path is not a path, the model no module, or a batch none.
        ValueError: if there is no batch, or the file is not the model's.
    """
    given = as_batches(explain_differences, model, batches)
    run: Run
    follow: Follow
    fused: Fused | None = None
    if engine is None:
        run = partial(run_session, open_session(path, exact=not default_session))
        comparison = LayerComparison(path, model, default_session=default_session)
        follow, fused = comparison.follow, comparison.fused
    else:
        run, follow = TorchFile(Path(path).read_bytes(), engine), litert_following(path, model, engine)
    # Engines of .tflite files round in fixed point: one level off is no other function.
    answer, levels = partial(answers, "explain_differences", run, model), None if engine is None else 1
    with evaluating(model), torch.no_grad():
        return explained(given, answer, follow, enough, levels, fused, classes)


def explained(
    batches: Iterable[B],
    answer: Callable[[B], tuple[Inputs, Pair]],
    follow: Follow,
    enough: int | None = None,
    levels: int | None = None,
    fused: Fused | None = None,
    classes: bool = True,
) -> Differences:
    """Explain the differences of any runtime.

    Any integer may be off by `levels`; None: by near-ties alone. `fused` finds layers that the runtime computes
    otherwise while nobody reads integers.
    """
    counts: Tensor | None = None
    layers: list[LayerDifference] = []
    for batch in batches:
        inputs, (ours, theirs, _) = answer(batch)
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel()]  # others have no predictions
        off = unexplained = [~each for each in _right(pairs, classes)]
        if any(bool(each.any()) for each in off):
            found, followed = follow(inputs)
            layers = _sums([*layers, *found])
            wrong = [each.beyond_ties if levels is None else each.largest > levels for each in found]
            if not any(wrong) and any(each.differing for each in found):
                known = _right([both for both in followed if both[0].numel()], classes)
                same = _right([(read, b) for (_, read), b in zip(followed, theirs, strict=True) if b.numel()], classes)
                unexplained = [each & ~(a & b) for each, a, b in zip(off, known, same, strict=True)]
            if fused is not None and any(bool(each.any()) for each in unexplained):
                layers = _sums([*layers, *fused(inputs, [read for _, read in followed])])
        differ = [~equal_predictions([both], classes) for both in pairs]
        new = [[a.numel(), int(a.sum()), int(b.sum())] for a, b in zip(differ, unexplained, strict=True)]
        counts = torch.tensor(new) if counts is None else counts + torch.tensor(new)
        if enough is not None and int(counts[:, 2].max()) >= enough:
            break
    if counts is None:
        raise ValueError("explain_differences: batches is empty; at least one batch is needed to compare anything")
    rows = counts.tolist()
    # The output that differs most stands for all.
    predictions, differing, unexplained = max(rows, key=lambda row: (row[2] / row[0], row[1] / row[0]))
    return Differences(predictions, differing, unexplained, layers)


def _right(pairs: list[tuple[Tensor, Tensor]], classes: bool) -> list[Tensor]:
    return [equal_predictions([both], classes) & close_predictions([both], classes) for both in pairs]


def _sums(layers: list[LayerDifference]) -> list[LayerDifference]:
    found: dict[tuple[str, tuple[str, ...]], LayerDifference] = {}
    for each in layers:
        old = found.setdefault((each.name, each.fused), replace(each, elements=0, differing=0, beyond_ties=0))
        sums = {key: getattr(old, key) + getattr(each, key) for key in ("elements", "differing", "beyond_ties")}
        found[each.name, each.fused] = replace(each, largest=max(old.largest, each.largest), **sums)
    return list(found.values())
