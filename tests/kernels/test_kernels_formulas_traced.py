"""What every formula promises besides its numbers: operators' signatures, whole graphs, and never to wait."""

import inspect
import sys
from typing import Any

import pytest
import torch
from cases_formulas import calls, dense
from cases_waiting import Watch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qat.kernels.cpu import compiler
from qat.kernels.formulas.products import try_int_mm

CALLS = calls()


@pytest.fixture(autouse=True)
def _tried() -> None:
    try_int_mm(torch.device("cpu"))


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@pytest.mark.parametrize("name", CALLS)
def test_signatures_are_the_operators(name: str) -> None:
    operator, formula, _ = CALLS[name]
    assert formula.__name__ == operator.__name__
    given = inspect.signature(operator), inspect.signature(formula)
    assert [*given[0].parameters.values()] == [*given[1].parameters.values()]
    assert given[0].return_annotation == given[1].return_annotation


def test_every_operator_has_a_formula() -> None:
    modules = {sys.modules[call.operator.__module__] for call in CALLS.values()}
    operators = {
        name
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "__wrapped__") and hasattr(torch.ops.qat, name)
    }
    assert operators | {"dequantize"} == {name.split()[0] for name in CALLS}


@pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_operators_shapes_types_and_strides(name: str) -> None:
    operator, formula, arguments = CALLS[name]
    for expected, found in zip(tensors(operator(*arguments)), tensors(formula(*arguments)), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert dense(found) == dense(expected)


MULTIPLYING = ["codes_product", "codes_product in integers", "codes_matmul"]


@pytest.mark.parametrize(
    ("name", "autocast"), [*((name, False) for name in CALLS), *((name, True) for name in MULTIPLYING)]
)
def test_torch_compile_traces_it_whole(name: str, autocast: bool) -> None:
    """Functionalised, too; the result is that of the eager formula."""
    _, formula, arguments = CALLS[name]
    torch.compiler.reset()
    traced = torch.compile(formula, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        results = zip(tensors(traced(*arguments)), tensors(formula(*arguments)), strict=True)
    for found, expected in results:
        assert torch.equal(found, expected) and dense(found) == dense(expected)
        assert found.dtype == expected.dtype and (not autocast or found.dtype == torch.bfloat16)


@pytest.mark.parametrize("name", CALLS)
def test_it_never_waits_and_writes_to_no_argument(name: str) -> None:
    _, formula, arguments = CALLS[name]
    before = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
    with Watch(arguments) as watch:
        formula(*arguments)
    assert watch.seen
    for each, copy in zip(arguments, before, strict=True):
        assert not isinstance(each, Tensor) or torch.equal(each, copy)


def test_what_waits_is_seen() -> None:
    x = torch.ones(2)
    for waiting in (lambda: x.sum().item(), lambda: bool(x.any()), lambda: x[x > 0], lambda: torch.equal(x, x)):
        with pytest.raises(AssertionError, match="waits"), Watch((x,)):
            waiting()
    with pytest.raises(AssertionError, match="writes"), Watch((x,)):
        x.add_(1)


@pytest.mark.parametrize("name", CALLS)
def test_new_tensors_are_where_the_arguments_are(name: str) -> None:
    """On pretended CUDA: a tensor made on the CPU would not mix with the others."""
    _, formula, arguments = CALLS[name]
    with FakeTensorMode() as fake:
        pretended = [fake.from_tensor(each).to("cuda") if isinstance(each, Tensor) else each for each in arguments]
        results = tensors(formula(*pretended))
    assert {result.device.type for result in results} == {"cuda"}
