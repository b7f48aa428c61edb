"""The matrix can turn red: each check catches the wrong estimators that it is for, and the command reports them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qat import functional
from qat.functional.lsq import lsq_quantize
from qat.functional.soft import dsq_round
from tests import estimator_matrix as matrix

CASES = matrix.all_cases()

NO_ESTIMATORS = {"apot_levels", "apply", "bit_cost", "normalize_weight", "scale_gradient"}
"""What of `qat.functional` quantizes nothing."""


def test_every_estimator_has_a_row() -> None:
    named = {name for name in functional.__all__ if callable(getattr(functional, name))} - NO_ESTIMATORS
    assert {name for name in named if not any(case.name.startswith(name) for case in CASES)} == set()


def rounded_away(x: Tensor) -> Tensor:
    """Round half away from zero, straight through."""
    return x + (torch.sign(x) * torch.floor(x.abs() + 0.5) - x).detach()


def masked_late(x: Tensor, scale: Tensor) -> Tensor:
    """LSQ with the mask of torch's operators, taken on the rounded value."""
    v = torch.round(x / scale)
    inside = x + scale * (v - x / scale).detach()
    return torch.where(v < -8, -8 * scale, torch.where(v > 7, 7 * scale, inside))


def unmasked(x: Tensor, scale: Tensor) -> Tensor:
    """LSQ where x gets its gradient everywhere, the most common mistake of published re-implementations."""
    return x + (lsq_quantize(x, scale, -8, 7) - x).detach() + 0 * scale.sum()


# Of the columns of `ste_gradcheck` one is enough: that each of them catches its mistakes is in test_testing.py.
REDS = [
    ("round_ste", rounded_away, "reference"),
    ("round_ste", lambda x: torch.round(x) + 0 * x, "gradient"),
    ("round_ste", lambda x: torch.round(x) + 0 * x, "reference gradient"),
    ("lsq_quantize, grad_factor 1", masked_late, "reference gradient"),
    ("lsq_quantize, grad_factor 1", masked_late, "outside"),
    ("lsq_quantize, grad_factor 1", unmasked, "outside"),
    ("lsq_quantize, grad_factor 1", unmasked, "broadcast"),
    ("lsq_quantize, grad_factor 0.125", lambda x, scale: lsq_quantize(x, scale, -8, 7), "gradient"),
    ("lsq_quantize, grad_factor 1", lambda x, scale: lsq_quantize(x, scale, -9, 7), "levels"),
    ("lsq_quantize, grad_factor 1", lambda x, scale: lsq_quantize(x, scale, -8, 7) + 1, "zero"),
    ("lsq_quantize, grad_factor 1", lambda x, scale: lsq_quantize(x, scale, -8, 7) / 2, "idempotent"),
    ("lsq_quantize, grad_factor 1", lambda x, scale: -lsq_quantize(x, scale, -8, 7), "monotone"),
    ("sign_ste, clipped", lambda x: torch.sign(x).detach() + 0 * x, "levels"),
    ("soft_round, temperature 4.0", dsq_round, "idempotent"),  # an excuse that is not needed
    ("positive_scale", lambda x, smallest: x.clone(), "nan_inf"),  # the same
]


@pytest.mark.parametrize(("name", "mutant", "column"), REDS, ids=[f"{n}-{c}-{i}" for i, (n, _, c) in enumerate(REDS)])
def test_a_wrong_estimator_makes_its_cell_red(name: str, mutant: Callable[..., Tensor], column: str):
    (case,) = (case for case in CASES if case.name == name)
    assert not matrix.cell(case, column).startswith(matrix.RED)
    found = matrix.cell(dataclasses.replace(case, function=mutant), column)
    assert found.startswith(matrix.RED), found


def test_the_command_writes_the_table_and_tells_when_it_is_out_of_date(tmp_path: Path, capsys):
    path = tmp_path / "docs" / "table.md"
    cases = [case for case in CASES if case.name in ("round_ste", "sign_ste, clipped")]
    assert matrix.main(["--check"], cases, path) == 1 and not path.exists()
    assert matrix.main([], cases, path) == 0
    text = path.read_text(encoding="utf-8")
    assert "| sign_ste, clipped | ✓ | ✓ | ✓ | ✓ | · |" in text and "1. the levels are all integers" in text
    assert matrix.main(["--check"], cases, path) == 0
    path.write_text(text.replace("Run with torch ", "Run with torch 9"), encoding="utf-8")
    assert matrix.main(["--check"], cases, path) == 0
    path.write_text(text.replace("✓", "✗", 3), encoding="utf-8")
    capsys.readouterr()
    assert matrix.main(["--check"], cases, path) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "table.md is out of date; run: python tests/estimator_matrix.py"
    broken = [dataclasses.replace(cases[0], function=rounded_away)]
    assert matrix.main([], broken, path) == 1
    assert "round_ste, reference: ✗ AssertionError" in capsys.readouterr().out
    assert matrix.main(["--check"], broken, path) == 1
