"""`qat.testing.grid_points`: the values at which rules for an integer grid differ."""

from typing import Any

import pytest
import torch

from qat.testing import grid_points


@pytest.mark.parametrize(("scale", "zero", "qmin", "qmax"), [(0.5, 0, -8, 7), (0.1, 3, 0, 15), (3e-7, -5, -128, 127)])
def test_grid_points_lie_where_rules_differ(scale: float, zero: int, qmin: int, qmax: int) -> None:
    x = grid_points(scale, zero, qmin, qmax)
    assert x.dtype == torch.float64 and (x.diff() > 0).all()
    codes = x / scale + zero
    near = codes.tolist()
    for wanted in (qmin - 0.5, qmin - 0.25, qmin, qmin + 0.25, qmax - 0.25, qmax, qmax + 0.25, qmax + 0.5, zero):
        assert any(abs(code - wanted) < 1e-9 for code in near), wanted
    assert codes.min() < 2 * qmin - qmax and codes.max() > 2 * qmax - qmin
    inside = (codes > qmin) & (codes < qmax)
    ties = (x / scale).abs()[inside & ((x / scale).abs() % 1 == 0.5)]
    assert {value % 2 for value in ties.tolist()} == {0.5, 1.5}
    assert (inside & (codes % 1 != 0) & (codes % 1 != 0.5)).any()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0.0, 0, -8, 7), "grid_points: scale must be positive and finite, got 0.0"),
        ((float("nan"), 0, -8, 7), "grid_points: scale must be positive and finite, got nan"),
        ((0.5, 0, 7, 7), "grid_points: qmin must be below qmax, got qmin=7 and qmax=7"),
    ],
)
def test_grid_points_refuses_what_is_no_grid(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:
        grid_points(*arguments)
    assert str(refusal.value) == sentence
