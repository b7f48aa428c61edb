"""What every operator and its formula promise besides their numbers: one call, whole graphs, and never to wait."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qat.kernels.cpu import compiler
from qat.kernels.formulas.products import try_int_mm
from tests.references.cases_kernels import FORMULA, C, calls, dense, same
from tests.references.cases_waiting import Watch

CALLS = calls()
NAMES = sorted({case.split()[0] for case in CALLS})
MULTIPLYING = ["codes_product", "codes_product in integers", "codes_matmul"]


@pytest.fixture(autouse=True)
def _tried() -> None:
    try_int_mm(torch.device("cpu"))


def formula_of(case: str) -> Any:
    return getattr(FORMULA, case.split()[0])


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def leaves(arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of arguments, also those in lists."""
    every = [inner for each in arguments for inner in (each if isinstance(each, list) else [each])]
    return [each for each in every if isinstance(each, Tensor)]


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


@pytest.mark.parametrize(("case", "autocast"), [*((case, False) for case in CALLS), *((m, True) for m in MULTIPLYING)])
def test_torch_compile_traces_it_whole(case: str, autocast: bool) -> None:
    torch.compiler.reset()
    traced = torch.compile(formula_of(case), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        results = zip(tensors(traced(*CALLS[case])), tensors(formula_of(case)(*CALLS[case])), strict=True)
    for found, expected in results:
        assert torch.equal(found, expected) and dense(found) == dense(expected)
        assert found.dtype == expected.dtype and (not autocast or found.dtype == torch.bfloat16)


@pytest.mark.parametrize("case", CALLS)
def test_it_never_waits_and_writes_to_no_argument(case: str) -> None:
    given = leaves(CALLS[case])
    before = [each.clone() for each in given]
    with Watch(tuple(given)) as watch:
        formula_of(case)(*CALLS[case])
    assert watch.seen
    for each, copy in zip(given, before, strict=True):
        same(each, copy)


def test_what_waits_is_seen() -> None:
    x = torch.ones(2)
    for waiting in (lambda: x.sum().item(), lambda: bool(x.any()), lambda: x[x > 0], lambda: torch.equal(x, x)):
        with pytest.raises(AssertionError, match="waits"), Watch((x,)):
            waiting()
    with pytest.raises(AssertionError, match="writes"), Watch((x,)):
        x.add_(1)


@pytest.mark.parametrize("case", CALLS)
def test_new_tensors_are_where_the_arguments_are(case: str) -> None:
    """On pretended CUDA: a tensor made on the CPU would not mix with the others."""

    def moved(each: Any) -> Any:
        if isinstance(each, list):
            return [moved(inner) for inner in each]
        return fake.from_tensor(each).to("cuda") if isinstance(each, Tensor) else each

    with FakeTensorMode() as fake:
        results = tensors(formula_of(case)(*map(moved, CALLS[case])))
    assert {result.device.type for result in results} == {"cuda"}
