"""Which answers verification calls equal: classes, values within a tolerance, integers; never an empty comparison."""

import math

import pytest
import torch
from torch import Tensor

from qat.export.agreement import TOLERANCE, judge

VALUES = torch.linspace(-1, 3, 200)


@pytest.mark.parametrize("shape", [(200,), (200, 1), (2, 1, 10, 10), (100, 1, 2)])
def test_values_without_classes_are_equal_within_a_share_of_their_range(shape: tuple[int, ...]) -> None:
    ours = VALUES.reshape(shape)
    assert judge([([ours], [ours + 0.99 * TOLERANCE * 4], None)]).agreement == 1.0
    assert judge([([ours], [ours + 1.01 * TOLERANCE * 4], None)]).agreement == 0.0
    half = torch.where(torch.arange(200).reshape(shape) % 2 == 0, ours, -ours - 1)
    assert judge([([ours], [half], None)]).agreement == pytest.approx(0.5, abs=0.02)


def test_the_range_is_that_of_all_batches() -> None:
    """The values arrive one at a time, as from a model with a batch of one."""
    pairs = [([x.reshape(1, 1)], [x.reshape(1, 1) + 0.03], None) for x in VALUES]
    assert judge(list(pairs)).agreement == 1.0
    assert judge(pairs[:3]).agreement == 0.0


def test_a_constant_output_has_to_be_the_same_up_to_rounding() -> None:
    ours = torch.full((4, 1), 5.0)
    assert judge([([ours], [ours + 2e-5], None)]).agreement == 1.0
    assert judge([([ours], [ours + 2e-4], None)]).agreement == 0.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_and_masks_have_to_be_the_same(dtype: torch.dtype) -> None:
    """Read as classes, they would agree wherever the largest value has the same index."""
    ours = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]]).to(dtype)
    theirs = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]]).to(dtype)
    assert judge([([ours], [theirs], None)]).agreement == 0.75
    large = torch.tensor([2**24, 2**24 + 1])
    assert judge([([large], [large.flip(0)], None)]).agreement == 0.0


def test_the_output_that_agrees_least_counts() -> None:
    """Many equal pixels do not hide a wrong class."""
    classes = torch.eye(4)
    found = judge([([VALUES, classes], [VALUES, classes.flip(0)], None)])
    assert found.agreement == 0.0 and found.max_difference == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_equals_nothing(bad: float) -> None:
    values, classes = VALUES.clone(), torch.eye(4)
    values[0] = classes[0, 0] = bad
    assert judge([([values], [values], None)]).agreement == 199 / 200
    found = judge([([classes], [classes], torch.arange(4))])
    assert found.agreement == 0.75 and math.isnan(found.max_difference)
    assert found.onnx_top1 == (75.0 if math.isnan(bad) else 100.0)
    assert judge([([torch.full((4,), bad)], [torch.full((4,), bad)], None)]).agreement == 0.0
    for ours, theirs in ((classes, torch.eye(4)), (torch.eye(4), classes)):  # the largest value is at the same place
        assert judge([([ours], [theirs], None)]).agreement == 0.75


@pytest.mark.parametrize(("outputs", "batches"), [([], 1), ([torch.zeros(0, 10)], 2)])
def test_nothing_to_compare_is_refused(outputs: list[Tensor], batches: int) -> None:
    with pytest.raises(
        ValueError, match=r"^verify_onnx: the model's outputs hold no values, so that nothing could be compared$"
    ):
        judge([(outputs, outputs, None)] * batches)


def test_a_batch_without_detections_is_skipped() -> None:
    empty = torch.zeros(0, 4)
    found = judge([([empty], [empty], None), ([torch.eye(4)], [torch.eye(4)], None)])
    assert (found.samples, found.agreement) == (4, 1.0)


@pytest.mark.parametrize(
    ("output", "labels"),
    [
        (torch.randn(4, 1), torch.zeros(4)),  # the arg max of one value is always 0
        (torch.eye(4), torch.eye(4)),  # soft labels
        (torch.randn(4), torch.zeros(4)),
    ],
)
def test_without_labels_of_classes_there_is_no_accuracy(output: Tensor, labels: Tensor) -> None:
    found = judge([([output], [output], labels)])
    assert found.torch_top1 is None and found.onnx_top1 is None


def test_labels_of_pixels_count() -> None:
    logits = torch.eye(3).reshape(1, 3, 3, 1)
    labels = torch.tensor([0, 1, 0]).reshape(1, 3, 1)
    assert judge([([logits], [logits], labels)]).torch_top1 == pytest.approx(200 / 3)
