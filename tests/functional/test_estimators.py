"""Every estimator against its published rule: each cell of docs/estimators_matrix.md, which can turn red; NaN.

The rows are those of cases_uniform.py and cases_codebooks.py. What other libraries compute is in test_oracles.py, what
one rule alone promises in test_primitives.py and test_edges.py.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat import functional
from qat.functional.lsq import lsq_plus_quantize, lsq_quantize
from qat.functional.soft import dsq_round
from qat.testing import CHECKS
from qat.testing.estimator import as_leaves
from qat.testing.report import uneven
from tests import estimator_matrix as matrix
from tests.references import estimator_proof as proof
from tests.references import reference
from tests.references.estimator_case import PROPERTIES, Case

CASES = matrix.all_cases()
FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def test_rows_are_told_apart_and_excuse_what_there_is():
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)
    for case in CASES:
        assert set(proof.excuses(case)) <= {*CHECKS, *PROPERTIES}, case.name


# The compiler takes half of the time, and CI proves all of it anyway with estimator_matrix.py.
SLOW = {"compile": [pytest.mark.slow]}


@pytest.mark.parametrize("column", [pytest.param(name, marks=SLOW.get(name, [])) for name in matrix.COLUMNS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_cell_of_the_matrix_holds(case: Case, column: str):
    found = matrix.cell(case, column)
    assert not found.startswith(matrix.RED), found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rules_are_checked_against_the_published_gradient(case: Case):
    proof.claim(case)


FULL = [case for case in CASES if case.elementwise and case.levels is not None]


@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_every_level_is_reached(case: Case):
    assert len(np.unique(proof.at(case, proof.sweep(case)))) == case.levels


def with_first(case: Case, value: float) -> tuple[Tensor, ...]:
    x = case.inputs[0].clone()
    x.view(-1)[0] = value
    return x, *case.inputs[1:]


def derivatives(case: Case, inputs: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """The output, its gradients, and the gradient of x differentiated by every input and the cotangent."""
    leaves = as_leaves(inputs)
    y = case.function(*leaves)
    leaves.append(uneven(y).requires_grad_())
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(y, leaves[:-1], leaves[-1], **options)
    second = torch.autograd.grad(first[0], leaves, uneven(first[0]), **options) if first[0].requires_grad else ()
    return y.detach(), [each.detach() for each in (*first, *second)]


def among(cases: list[Case], *names: str) -> list[Case]:
    """Without the rows whose names begin like this."""
    return [case for case in cases if not case.name.startswith(names)]


# positive_scale reads infinity as the largest scale, power_of_two_scale has no larger power in float64.
UNBOUNDED = among([case for case in CASES if case.elementwise], "positive_scale", "power_of_two")


@pytest.mark.parametrize("case", UNBOUNDED, ids=lambda case: case.name)
def test_infinity_goes_where_huge_values_go(case: Case):
    for sign in (1.0, -1.0) if (case.inputs[0] < 0).any() else (1.0,):
        huge = case.function(*with_first(case, sign * 1e300)).flatten()[0].item()
        y, found = derivatives(case, with_first(case, sign * math.inf))
        assert y.flatten()[0].item() == (huge if abs(huge) < 1e200 else math.copysign(math.inf, huge))
        assert all(each.isfinite().all() for each in found)


def channels_are_apart(case: Case) -> bool:
    return any("own scale" in reason for reason in case.excused.values()) and not case.name.endswith(", axis 0")


APART = [case for case in among(CASES, "positive_scale") if case.elementwise or channels_are_apart(case)]


@pytest.mark.parametrize("case", APART, ids=lambda case: case.name)
def test_nan_spares_the_derivatives_of_its_neighbours(case: Case):
    """Of an elementwise rule all others; of a rule with a scale per channel or block those of the other channels."""
    kept = slice(1 if case.elementwise else case.inputs[0][0].numel(), None)
    (clean, slopes), (y, found) = (derivatives(case, inputs) for inputs in (case.inputs, with_first(case, math.nan)))
    assert y.flatten()[0].isnan()
    for got, expected in zip((y, *found), (clean, *slopes), strict=True):
        if got.shape == case.inputs[0].shape:  # parameters may get NaN
            assert torch.equal(got.flatten()[kept], expected.flatten()[kept])


# Not where the parameter acts on the gradient only.
LEARNED = among(CASES, "positive_scale", "ewgs", "error_decay", "binary", "dsq")
PARAMETERS = [(case, slot) for case in LEARNED for slot in range(1, len(case.inputs))]


@pytest.mark.parametrize(("case", "slot"), PARAMETERS, ids=lambda each: getattr(each, "name", str(each)))
def test_a_parameter_that_is_nan_is_not_swallowed(case: Case, slot: int):
    inputs = [each.clone() for each in case.inputs]
    inputs[slot].view(-1)[0] = math.nan
    missing = case.function(*inputs).isnan()
    assert missing.all() if case.elementwise else missing.any()


@pytest.mark.parametrize("case", [case for case in CASES if case.surrogate], ids=lambda case: case.name)
def test_forward_over_reverse_equals_that_of_the_surrogate(case: Case):
    assert case.surrogate is not None
    slots, tangents = tuple(range(len(case.inputs))), tuple(uneven(each, 3) for each in case.inputs)
    found = []
    for function in (case.function, case.surrogate):
        gradient = torch.func.grad(lambda *inputs, f=function: (f(*inputs) * uneven(case.inputs[0])).sum(), slots)
        found.append(torch.func.jvp(gradient, case.inputs, tangents)[1])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


finite = st.floats(-1e4, 1e4, allow_nan=False, width=32)
tensors = st.lists(finite, min_size=1, max_size=20).map(lambda values: torch.tensor(values, dtype=torch.float64))
steps = st.floats(1e-3, 1e3)


@settings(FEW, max_examples=25)
@given(tensors, steps, st.integers(2, 8), st.integers(-200, 200))
def test_uniform_grids_have_their_levels_in_order_and_hold_zero(x, step, bits, zero):
    qmin, qmax = reference.bounds(bits, signed=True)
    scale, zero_point = torch.tensor(step, dtype=torch.float64), torch.tensor(float(zero))
    x = torch.cat([x.sort().values, torch.zeros(1, dtype=torch.float64)])
    for quantize, parameters in ((lsq_quantize, (scale,)), (lsq_plus_quantize, (scale, zero_point))):
        y, every = (quantize(each, *parameters, qmin, qmax) for each in (x, scale * torch.arange(-600, 600)))
        assert torch.equal(quantize(y, *parameters, qmin, qmax), y)
        assert (y[:-1].diff() >= 0).all()
        assert len(y.unique()) <= 2**bits and len(every.unique()) == 2**bits
        assert y[-1] == 0


def test_nan_is_kept_by_the_kernels_of_float32_too():
    one, missing = torch.tensor(1.0, requires_grad=True), torch.tensor(math.nan)
    x = torch.tensor([0.4, math.nan, 9.0])
    for y in (lsq_quantize(x, one, -8, 7), lsq_plus_quantize(x, one, one.detach(), -8, 7)):
        assert y.isnan().tolist() == [False, True, False]
        assert torch.autograd.grad(y.sum(), one)[0].isnan()
    assert lsq_quantize(x, missing, -8, 7).isnan().all()
    assert lsq_plus_quantize(x, missing, one, -8, 7).isnan().all()
    assert lsq_plus_quantize(x, one, missing, -8, 7).isnan().all()


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


def test_the_command_tells_when_the_table_is_out_of_date(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(matrix, "COLUMNS", [name for name in matrix.COLUMNS if name != "compile"])
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
