"""Comparison of two runtimes' answers: classes, values in a tolerance, integers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qat.inputs import Batch, Inputs, inputs_and_labels, run_batch
from qat.integers.following import ROUNDING, LayerDifference
from qat.torch_internals import pytree

TOLERANCE = 0.01
"""Largest error of a value that counts as equal, as a share of the range of the model's output: between two and three
levels of an output with 8 bits."""

MIN_AGREEMENT = 0.995
"""Share of predictions below which a proof fails: those that are right, or differ because of near-ties alone."""

Pair = tuple[list[Tensor], list[Tensor], Tensor | None]
"""The outputs of the model and of the file for one batch, and its labels if there are any."""

Run = Callable[[Inputs], list[Tensor]]
"""Function from inputs to a runtime's outputs."""

Follow = Callable[[Inputs], tuple[list[LayerDifference], list[tuple[Tensor, Tensor]]]]
"""Function from inputs to every layer's integers, given the file's before it, and to the outputs twice: by torch from
the file's last integers, and by the file while it is read."""


@dataclass(frozen=True)
class Verification:
    """The answers of an ONNX file compared with those of its torch model.

    Attributes:
        samples: how many were compared.
        agreement: share of equal predictions, 0 to 1, for the output that agrees least. A prediction is the class with
            the largest value along axis 1. Where an output has no such axis, or one of length 1 (regression, depth
            maps), every value is a prediction: it is equal if it is off by at most `TOLERANCE` times the range of that
            output over all batches. Integers and booleans have to be equal. NaN and infinity equal nothing.
        torch_top1, onnx_top1: percent correct for the first output; None without labels for its classes.
        max_difference: largest absolute difference of an output; NaN where a value is not finite.
        float_convolutions: how many convolutions ONNX Runtime computes in float, transposed ones included, for which
            it has no integer kernel: equal answers alone are no proof of integers.
        close: share of predictions whose values are all off by at most that tolerance, for the output where it is
            least. Near-ties may move values further; `qat.export.explain_differences` tells.
    """

    samples: int
    agreement: float
    torch_top1: float | None
    onnx_top1: float | None
    max_difference: float
    float_convolutions: int = 0
    close: float = 1.0

    @property
    def is_right(self) -> bool:
        """True if predictions and values are the model's, without a look at near-ties."""
        return self.agreement >= MIN_AGREEMENT and self.close >= MIN_AGREEMENT


def output_tensors(answer: object) -> list[Tensor]:
    """Return the tensors of a model's answer, in the order of the file's outputs."""
    return [leaf.cpu() for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]


def answers(caller: str, run: Run, model: torch.nn.Module, batch: Batch) -> tuple[Inputs, Pair]:
    """Return a batch's inputs, and both outputs for them with the labels of classes."""
    inputs, labels = inputs_and_labels(caller, batch)
    expected = output_tensors(run_batch(caller, model, inputs))
    return inputs, (expected, run(inputs), labels if isinstance(labels, Tensor) else None)


def verdict_on(pairs: list[Pair], float_convolutions: int = 0, classes: bool = True) -> Verification:
    """Compare the outputs of all batches."""
    if not pairs:
        raise ValueError("verify_onnx: batches is empty; at least one batch is needed to compare anything")
    for expected, got, _ in pairs:
        if [tuple(x.shape) for x in expected] != [tuple(x.shape) for x in got]:
            raise ValueError("verify_onnx: the file's outputs have other shapes than the model's; was it made from it?")
    # Per output the pairs of all batches, in place of per batch the pairs of all outputs.
    outputs = zip(*(list(zip(expected, got, strict=True)) for expected, got, _ in pairs), strict=True)
    compared = [held for both in outputs if (held := [(a, b) for a, b in both if a.numel()])]
    if not compared:
        raise ValueError("verify_onnx: the model's outputs hold no values, so that nothing could be compared")
    largest = torch.stack([(a.double() - b.double()).abs().max() for both in compared for a, b in both])
    return Verification(
        samples=sum(len(expected[0]) if expected[0].dim() else 1 for expected, _, _ in pairs),
        agreement=min(equal_predictions(both, classes).double().mean().item() for both in compared),
        torch_top1=_top1(pairs, 0),
        onnx_top1=_top1(pairs, 1),
        max_difference=largest.max().item(),
        float_convolutions=float_convolutions,
        close=min(close_predictions(both, classes).double().mean().item() for both in compared),
    )


def equal_predictions(both: list[tuple[Tensor, Tensor]], classes: bool = True) -> Tensor:
    """Return a flat mask over all batches: the predictions of one output are equal."""
    if not (classes and _has_classes(both[0][0])):
        return close_predictions(both, classes)
    same = [(a.argmax(1) == b.argmax(1)) & a.isfinite().all(1) & b.isfinite().all(1) for a, b in both]
    return torch.cat([each.flatten() for each in same])


def close_predictions(both: list[tuple[Tensor, Tensor]], classes: bool = True) -> Tensor:
    """Return a mask of right predictions: equal integers, or within `TOLERANCE`."""
    first = both[0][0]
    if not first.is_floating_point():
        return torch.cat([(a == b).flatten() for a, b in both])
    known = torch.cat([a[a.isfinite()].double() for a, _ in both])
    span = known.max() - known.min() if known.numel() else 0.0
    allowed = torch.as_tensor(TOLERANCE * span).clamp(min=ROUNDING * known.abs().max() if known.numel() else 0.0)
    close = [(a.double() - b.double()).abs() <= allowed for a, b in both]  # false for NaN and infinities
    return torch.cat([(each.all(1) if classes and _has_classes(first) else each).flatten() for each in close])


def _has_classes(output: Tensor) -> bool:
    return output.is_floating_point() and output.dim() > 1 and output.shape[1] > 1


def _top1(pairs: list[Pair], which: int) -> float | None:
    # Percent correct for the first output of the model (0) or the file (1); an answer with NaN is wrong.
    right = []
    for *both, labels in pairs:
        if labels is None:
            continue
        logits = both[which][0]
        if not _has_classes(logits) or labels.shape != logits[:, 0].shape:
            return None  # labels of something else than classes
        right.append(((logits.argmax(1) == labels.to(logits.device)) & ~logits.isnan().any(1)).flatten())
    return 100.0 * torch.cat(right).double().mean().item() if right else None
