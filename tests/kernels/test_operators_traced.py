"""What every operator and its formula promise besides their numbers: one call, whole graphs, and never to wait."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from qat.kernels.cpu import compiler
from tests.references.cases_kernels import FORMULA, C, calls, dense

CALLS = calls()
NAMES = sorted({case.split()[0] for case in CALLS})


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def test_every_operator_has_a_formula_with_its_arguments() -> None:
    own = {name for name, value in vars(C).items() if hasattr(value, "library")}
    assert own == set(NAMES)
    for name in NAMES:
        given = inspect.signature(getattr(C, name)), inspect.signature(getattr(FORMULA, name))
        assert list(given[0].parameters) == list(given[1].parameters), name


@pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
@pytest.mark.parametrize("case", CALLS)
def test_results_have_the_shapes_types_and_strides_that_the_formula_foretells(case: str) -> None:
    """torch.compile plans with those of the formula, and runs the C code."""
    expected, found = (tensors(getattr(ops, case.split()[0])(*CALLS[case])) for ops in (C, FORMULA))
    for one, other in zip(expected, found, strict=True):
        assert (one.shape, one.dtype, dense(one)) == (other.shape, other.dtype, dense(other))
    operator = getattr(torch.ops.qat, case.split()[0]).default
    torch.library.opcheck(operator, CALLS[case], test_utils="test_faketensor")
