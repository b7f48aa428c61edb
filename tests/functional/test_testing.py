"""`qat.testing.ste_gradcheck`: right estimators pass everything, and each mistake is caught where it belongs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qat.functional import lsq_quantize, positive_scale, round_ste
from qat.functional.tensors import apply
from qat.testing import CHECKS, GradcheckError, grid_points, ste_gradcheck
from tests.references import broken_estimators as broken
from tests.references.cases_uniform import lsq_surrogate, positive_scale_gradient
from tests.references.prepared_case import refused

X = grid_points(0.5, 0, -8, 7)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


SCALES = torch.tensor([[0.5, -3.0, 0.0], [0.25, 1e4, 0.7]], dtype=torch.float64)
RIGHT: dict[str, dict[str, Any]] = {
    "round_ste": {"function": round_ste, "surrogate": lambda x: x, "inputs": (grid_points(1.0, 0, -8, 7),)},
    "lsq_quantize": {"function": lambda x, scale: lsq_quantize(x, scale, -8, 7), "surrogate": lsq_surrogate,
                     "inputs": [(X, number(0.5)), (grid_points(0.1, 0, -8, 7)[:40].reshape(2, 4, 5), number(0.1))],
                     "broadcast": (1,)},
    "positive_scale": {"function": positive_scale, "surrogate": None, "gradient": positive_scale_gradient,
                       "inputs": (SCALES, number(0.25)), "broadcast": (1,),
                       "skip": ["nan_inf"]},  # reading NaN as a number is its purpose
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_estimators_pass_everything(name: str) -> None:
    report = ste_gradcheck(**RIGHT[name])
    assert report.passed and [each.name for each in report.results] == list(CHECKS)
    skipped = {each.name for each in report.results if each.skipped}
    assert skipped == {"round_ste": {"broadcast"}, "positive_scale": {"nan_inf"}}.get(name, set())


def clipped(x: Tensor) -> Tensor:
    """Bi-Real's: its derivative is 2 - 2|x| where |x| <= 1."""
    return torch.where(x.abs() <= 1, 2 * x - x * x.abs(), x.sign())


# What is wrong, which checks see it (compile aside), and what the first of those named says of it.
GRADIENTS = {"gradient", "broadcast", "second_order", "jvp"}
CAUGHT: list[tuple[type[torch.autograd.Function], set[str], str, str]] = [
    (broken.Right, set(), "", ""),
    (broken.MissingMask, GRADIENTS, "gradient", "d y[0] / d slot 0 at [0], where x = -13.15: got 1, expected 0"),
    (broken.StrictBounds, GRADIENTS, "gradient", "d y[7] / d slot 0 at [7], where x = -4: got 0, expected 1"),
    (broken.WrongScaleGradient, GRADIENTS, "gradient", "d y[0] / d slot 1, where x = -13.15: got 0.3, expected -8"),
    (broken.ForgetsTheScale, GRADIENTS, "gradient", "slot 1 gets no gradient, but its declared gradient is not None"),
    (broken.AsksNobody, {"slots"}, "slots",
     "with gradients for slot 1 only: AsksNobody computes a gradient for its input 0, which asks for none (see "
     "ctx.needs_input_grad)"),
    (broken.NoSumOverChannels, {"broadcast"}, "broadcast",
     "slot 1 of shape (2, 1, 1): d y[0, 0, 0] / d slot 1 at [1, 0, 0], where x = -13.15: got -8, expected 0"),
    (broken.ResidualNotDetached, {"second_order"}, "second_order",
     "gradient of slot 1 differentiated by slot 0 at [7], where x = -4: got -3.169934016, expected 0; 27 of 41 "
     "elements differ"),
    (broken.SavesItsSlope, {"second_order"}, "second_order",
     "gradient of slot 0 differentiated by slot 0 at [15], where x = -0.75: got 0, expected 2.869513961; 10 of 41 "
     "elements differ"),
    (broken.DifferentiableOnce, {"second_order", "jvp"}, "second_order",
     "gradient of slot 0 differentiated by the incoming gradient at [7], where x = -4: got 0, expected "
     "-0.8664078644; 27 of 41 elements differ"),
    (broken.OldStyle, {"func_grad", "vmap", "jvp"}, "func_grad",
     "torch.func.vjp raised RuntimeError: In order to use an autograd.Function with functorch transforms ..."),
    (broken.BranchesOnTheData, {"vmap", "meta"}, "vmap",
     "x batched: torch.func.vmap raised RuntimeError: vmap: It looks like you're ..."),
    (broken.ReadsTheScale, {"vmap", "meta"}, "meta",
     "float64: raised RuntimeError: Tensor.item() cannot be called on meta tensors"),
    (broken.WrongTangent, {"jvp"}, "jvp",
     "torch.func.jvp along slot 0, 1 at [0], where x = -13.15: got -8.339356881, expected -9.016407864; 14 of 41 "
     "elements differ"),
    (broken.ForgetsTheDevice, {"meta"}, "meta", "float64: raised RuntimeError: ..."),
    (broken.ReturnsFloat32, {"dtypes"}, "dtypes", "float16: the output is float32, expected float16"),
    (broken.NarrowArithmetic, {"dtypes"}, "dtypes",
     "float16: output at [13, 8], where x = -1.802734375: got -2.060546875, expected -1.544921875; 2 of 984 "
     "elements differ"),
    (broken.DensifiesItsOutput, {"layouts"}, "layouts",
     "channels_last: the output has strides (246, 82, 41, 1), expected (246, 1, 123, 3)"),
    (broken.ViewsTheGradient, {"layouts"}, "layouts", "transposed: raised RuntimeError: view size is not ..."),
    (broken.AveragesTheGradient, {"empty"}, "empty", "x of shape (0, 41): gradient of slot 1: got nan, expected 0"),
    (broken.NoNaN, {"nan_inf"}, "nan_inf", "x = nan at [0]: the output there is 0, expected nan"),
    (broken.DisturbsItsNeighbours, {"nan_inf"}, "nan_inf",
     "x = nan at [0]: gradient of slot 0 at [1], where x = -5.25: got nan, expected 0; 40 of 41 elements differ"),
]  # fmt: skip


def called(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """With forward mode derived from backward, except where the mistake is in that itself."""
    own = function in (broken.OldStyle, broken.WrongTangent)
    return function.apply if own else partial(apply, function)


def says(detail: str, message: str) -> bool:
    """Whether they are equal, up to the message's dots if it has some."""
    start, dots, _ = message.partition("...")
    return detail.startswith(start) if dots else detail == message


LSQ = (X, number(0.5))


@pytest.mark.parametrize(("function", "failing", "check", "message"), CAUGHT, ids=[each[0].__name__ for each in CAUGHT])
def test_mistakes_are_caught_where_they_belong(function, failing, check, message):
    surrogate, inputs = (clipped, (X,)) if function is broken.SavesItsSlope else (lsq_surrogate, LSQ)
    options = {"broadcast": range(1, len(inputs)), "skip": ["compile"], "raise_exception": False}
    report = ste_gradcheck(called(function), surrogate, inputs, **options)
    assert {each.name for each in report.failures} == failing, str(report)
    if failing:
        assert says(report[check].detail, message), report[check].detail
    assert all("\n" not in each.detail for each in report.results)
    assert all("raised" not in each.detail or each.error is not None for each in report.results)


@pytest.mark.parametrize(("function", "surrogate", "inputs", "message"), [
    (broken.Alias, torch.clone, (X,),
     "the output shares its memory with slot 0: return a new tensor, else the compiler of torch 2.11 loses the "
     "gradient"),
    (broken.WrongTangent, lsq_surrogate, LSQ, "torch.compile raised Unsupported: ..."),
    (broken.BranchesOnTheData, lsq_surrogate, LSQ, "torch.compile raised Unsupported: ..."),
])  # fmt: skip
def test_what_the_compiler_cannot_take_is_caught(function, surrogate, inputs, message):
    report = ste_gradcheck(called(function), surrogate, inputs, checks=["compile"], raise_exception=False)
    assert not report.passed
    assert says(report["compile"].detail, message)


def test_the_compilers_gradients_are_compared() -> None:
    """Whatever the backend makes of a graph: here one that is right forward and doubles every gradient."""

    def doubling(x: Tensor) -> Tensor:
        return x * 1 if not torch.compiler.is_compiling() else 2 * x - x.detach()

    report = ste_gradcheck(doubling, lambda x: x, (X,), checks=["compile"], raise_exception=False)
    assert report["compile"].detail == (
        "compiled: gradient of slot 0 at [0], where x = -13.15: got 2.854101966, expected 1.427050983; "
        "41 of 41 elements differ"
    )


def test_all_failures_are_raised_one_line_each() -> None:
    with pytest.raises(GradcheckError) as failure:
        ste_gradcheck(called(broken.NoNaN), lambda x, s: x, LSQ, checks=["nan_inf", "gradient", "empty"])
    assert isinstance(failure.value, AssertionError)
    assert str(failure.value) == (
        "2 of 3 checks failed for partial\n"
        "  gradient: slot 1 gets a gradient, but its declared gradient is None\n"
        "  nan_inf: x = nan at [0]: the output there is 0, expected nan"
    )


def test_the_report_is_a_table() -> None:
    def rounded(x: Tensor) -> Tensor:
        return round_ste(x)

    report = ste_gradcheck(rounded, lambda x: 3 * x, (X[3:],), checks=["gradient", "meta", "broadcast", "empty"],
                           skip=["empty"], raise_exception=False)  # fmt: skip
    assert str(report) == (
        "rounded: 4 checks, 1 failed\n"
        "  gradient   FAILED   d y[0] / d slot 0 at [0], where x = -4.5: got 1, expected 3\n"
        "  broadcast  skipped  no slot is named in broadcast\n"
        "  meta       ok       float64 and bfloat16\n"
        "  empty      skipped  left out by skip"
    )
    assert not report.passed and [each.name for each in report.failures] == ["gradient"]
    with pytest.raises(KeyError):
        report["vmap"]


def test_of_several_inputs_the_failing_one_is_named() -> None:
    inside, outside = (X[10:20], number(0.5)), (X[:10], number(0.5))
    check = partial(ste_gradcheck, called(broken.MissingMask), lsq_surrogate, checks=["gradient"])
    assert check([inside, inside])["gradient"].detail == "2 slots at 10 values of x"
    report = check([inside, outside], raise_exception=False)
    assert report["gradient"].detail == "inputs 1: d y[0] / d slot 0 at [0], where x = -13.15: got 1, expected 0"


def peak(x: Tensor) -> Tensor:
    """Not elementwise: every output depends on the largest input."""
    return x / x.abs().amax()


def test_functions_of_the_whole_tensor() -> None:
    x = X[:40].reshape(2, 4, 5)
    arguments: dict[str, Any] = {"surrogate": peak, "inputs": (x,), "elementwise": False}
    # No maximum of nothing.
    with pytest.raises(GradcheckError) as failure:
        ste_gradcheck(peak, skip=["compile"], **arguments)
    (line,) = str(failure.value).splitlines()[1:]
    assert line.startswith("  empty: x of shape (0, 4, 5): raised RuntimeError: amax():")
    assert ste_gradcheck(peak, skip=["empty", "compile"], **arguments).passed
    # NaN is lost: it is no maximum.
    report = ste_gradcheck(lambda x: peak(x.nan_to_num()), checks=["nan_inf"], raise_exception=False, **arguments)
    assert report["nan_inf"].detail == "x = nan at [0, 0, 0]: no element of the output is NaN"
    # Taken for elementwise, it disturbs its neighbours.
    report = ste_gradcheck(peak, peak, (x,), checks=["nan_inf"], raise_exception=False)
    assert report["nan_inf"].detail == (
        "x = nan at [0, 0, 0]: output at [0, 0, 1], where x = -5.25: got nan, expected -0.3992395437; "
        "39 of 40 elements differ"
    )


def test_inputs_are_left_as_they_are() -> None:
    x, scale = X.clone().requires_grad_(), number(0.5)
    with pytest.raises(ValueError, match="changes its input 0 in place"):
        ste_gradcheck(called(broken.WritesIntoX), lsq_surrogate, (x, scale))
    assert torch.equal(x.detach(), X) and x.grad is None


IDENTITY: dict[str, Any] = {"function": round_ste, "surrogate": lambda x: x, "inputs": (X,)}
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"inputs": (X.int(),)}, TypeError, "input 0 must be a float64 tensor, got torch.int32"),
    ({"inputs": (X, 0.5)}, TypeError, "input 1 must be a float64 tensor, got float"),
    *(({"inputs": wrong}, TypeError, f"inputs must .*got {type(wrong).__name__}") for wrong in (X, [X], (), [])),
    ({"inputs": (X[:0],)}, ValueError, r"input 0 has no elements, shape \(0,\)"),
    ({"checks": ["gradeint"]}, ValueError, "checks: unknown check 'gradeint'; did you mean 'gradient'?"),
    ({"skip": ["x"]}, ValueError, "skip: unknown check 'x'; valid: gradient, "),
    ({"checks": "gradient"}, TypeError, "checks must be a list of names, got the string 'gradient'"),
    ({"checks": []}, ValueError, "checks names no check"),
    ({"surrogate": None}, ValueError, "neither surrogate nor gradient is given"),
    ({"gradient": lambda grad, x: (grad,)}, ValueError, "surrogate and gradient are both given"),
    ({"surrogate": lambda x: x[:2]}, ValueError, r"surrogate returns shape \(2,\), function returns \(41,\)"),
    ({"surrogate": lambda x: (x,)}, TypeError, "surrogate must return one tensor, got tuple"),
    # Point 58: what torch says of a leaf that is written was all there was.
    ({"function": lambda x: x.round_()}, ValueError, "function changes its input 0 in place; let it compute a new"),
    ({"function": lambda x: 3.0}, TypeError, "function must return one tensor, got float"),
    ({"broadcast": (1,)}, ValueError, "broadcast names slot 1, but there are 0 parameters"),
    ({"broadcast": (0,)}, ValueError, "broadcast names slot 0"),
    ({"surrogate": None, "gradient": lambda grad, x: grad}, ValueError, "each of the 1 inputs, got Tensor"),
    ({"surrogate": None, "gradient": lambda grad, x: (grad, None)}, ValueError, "inputs, got a tuple of 2"),
    ({"surrogate": None, "gradient": lambda grad, x: (grad[:3],)}, ValueError, r"shape \(3,\) for slot 0"),
]


@pytest.mark.parametrize(("changes", "error", "fact"), MISTAKES, ids=[each[2] for each in MISTAKES])
def test_mistakes_of_the_caller_are_sentences(changes: dict[str, Any], error: type[Exception], fact: str) -> None:
    with pytest.raises(error, match=f"^ste_gradcheck: .*{fact}"):
        ste_gradcheck(**{**IDENTITY, **changes})


def test_an_error_of_the_function_itself_comes_out_as_it_is() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise OverflowError("my own")

    with refused("my own", OverflowError):
        ste_gradcheck(refuses, lambda x: x, (X,))


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


@pytest.mark.parametrize(("arguments", "fact"), [
    ((0.0, 0, -8, 7), "got 0.0"),
    ((float("nan"), 0, -8, 7), "got nan"),
    ((0.5, 0, 7, 7), "qmin=7 and qmax=7"),
])  # fmt: skip
def test_grid_points_refuses_an_empty_grid(arguments: tuple[Any, ...], fact: str) -> None:
    with pytest.raises(ValueError, match=f"^grid_points: .*{fact}"):
        grid_points(*arguments)
