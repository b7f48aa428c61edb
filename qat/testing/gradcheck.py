"""`ste_gradcheck`, which runs every check, and `grid_points` to check at."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from qat.testing.derivatives import (
    check_broadcast,
    check_func_grad,
    check_gradient,
    check_jvp,
    check_second_order,
    check_slots,
    check_vmap,
)
from qat.testing.environments import check_compile, check_dtypes, check_empty, check_layouts, check_meta, check_nan_inf
from qat.testing.estimator import Estimator, Inputs
from qat.testing.report import CheckResult, GradcheckError, GradcheckReport, Skipped, first_line
from qat.text import unknown_name

Check = Callable[[Estimator, Inputs], str]

CHECKS: dict[str, Check] = {
    "gradient": check_gradient,
    "slots": check_slots,
    "broadcast": check_broadcast,
    "second_order": check_second_order,
    "func_grad": check_func_grad,
    "vmap": check_vmap,
    "jvp": check_jvp,
    "meta": check_meta,
    "dtypes": check_dtypes,
    "compile": check_compile,
    "layouts": check_layouts,
    "empty": check_empty,
    "nan_inf": check_nan_inf,
}
"""The checks, in the order in which they run. Each takes an `Estimator` and one tuple of inputs, returns what it
checked, and raises `GradcheckError` with the first offending element, or `Skipped` where it does not apply."""

# In steps of the grid: on it, inside of a tie, on one, and between.
BESIDE_A_BOUND = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5)
BESIDE_ZERO = (0.0, 0.25, 0.5, 1.0, 1.3, 1.5, 2.5)


def ste_gradcheck(
    function: Callable[..., Tensor],
    surrogate: Callable[..., Tensor] | None,
    inputs: Sequence[Tensor] | Sequence[Sequence[Tensor]],
    *,
    gradient: Callable[..., tuple[Tensor | None, ...]] | None = None,
    broadcast: Iterable[int] = (),
    elementwise: bool = True,
    checks: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    backend: str | Callable[..., Any] = "aot_eager",
    raise_exception: bool = True,
    rtol: float = 1e-8,
    atol: float = 1e-10,
) -> GradcheckReport:
    """Verify a straight-through estimator against the gradient that it declares.

    Finite differences cannot see through rounding, so `torch.autograd.gradcheck` cannot judge such a function. Here
    its author declares the gradient as a `surrogate` (for rounding: the identity), and everything that follows from
    the declaration is checked. `CHECKS` lists the checks.

    Args:
        function: takes tensors and returns one tensor; bind all other arguments. It must accept any device and dtype.
        surrogate: a differentiable function of the same tensors whose gradient the backward claims to be; its value
            need not be the function's, its shape must be. None if no function has that gradient. Note that
            `torch.clamp` passes no gradient at its bounds from torch 2.15 on; use `torch.where` instead.
        inputs: one tuple of float64 tensors, x first, or a list of such tuples. See `grid_points`.
        gradient: replaces the surrogate: gradient(grad_output, *inputs) returns a gradient or None for each input,
            computed by differentiable operations. For an input that is broadcast it may have the shape of the input
            or of the output. Forward mode transposes it at grad_output = 0.
        broadcast: slots of `inputs` that broadcast against x. Their first values are tried in every shape, multiplied
            by up to 15/8 from channel to channel.
        elementwise: True if y[i] depends on x[i] and the parameters only.
        checks: names of the checks to run; None runs all.
        skip: names of checks to leave out; the report lists them as skipped.
        backend: of `torch.compile`.
        raise_exception: True to raise failures; otherwise only the report shows them.
        rtol, atol: float64 values are equal if |got - expected| <= atol + rtol * |expected|.

    Returns:
        The report; `str(report)` is a table.

    Raises:
        GradcheckError: if a check fails, one line each with the first offending element.
        TypeError, ValueError: if the arguments cannot be checked.

    >>> from qat.functional import round_ste
    >>> from qat.testing import grid_points
    >>> x = grid_points(1.0, 0, -8, 7)
    >>> print(ste_gradcheck(round_ste, lambda x: x, (x,), checks=["gradient", "second_order", "nan_inf"]))
    round_ste: 3 checks, 0 failed
      gradient      ok  1 slot at 41 values of x
      second_order  ok  1 gradient differentiated by 2 tensors
      nan_inf       ok  nan, inf, -inf at 3 of 41 elements

    A hard tanh is not the gradient of this rounding:

    >>> clipped = lambda x: torch.where(x.abs() <= 1, x, x.sign())
    >>> try:
    ...     ste_gradcheck(round_ste, clipped, (x,), checks=["gradient"])
    ... except GradcheckError as error:
    ...     print(error)
    1 of 1 check failed for round_ste
      gradient: ...
    """
    wanted = set(CHECKS) if checks is None else _known(checks, "checks")
    left_out = _known(skip, "skip")
    if not wanted:
        raise ValueError("ste_gradcheck: checks names no check; None runs all of them")
    estimator = Estimator(function, surrogate, gradient, tuple(broadcast), elementwise, backend, rtol, atol)
    cases = _cases(inputs)
    for case in cases:
        _require_sound(estimator, case)
    results = []
    for name in (name for name in CHECKS if name in wanted):  # in their order, whatever that of `checks`
        if name in left_out:
            results.append(CheckResult(name, True, "left out by skip", skipped=True))
        else:
            results.append(_result(name, estimator, cases))
    report = GradcheckReport(getattr(function, "__name__", type(function).__name__), tuple(results))
    if raise_exception:
        report.raise_failures()
    return report


def _result(name: str, estimator: Estimator, cases: list[Inputs]) -> CheckResult:
    details: list[str] = []
    for number, case in enumerate(cases):
        where = f"inputs {number}: " if len(cases) > 1 else ""
        try:
            details.append(CHECKS[name](estimator, tuple(tensor.clone() for tensor in case)))
        except Skipped as reason:
            return CheckResult(name, True, str(reason), skipped=True)
        except GradcheckError as failure:
            cause = failure.__cause__
            return CheckResult(name, False, f"{where}{failure}", error=cause if isinstance(cause, Exception) else None)
        except Exception as error:
            return CheckResult(name, False, f"{where}raised {first_line(error)}", error=error)
    return CheckResult(name, True, "; ".join(dict.fromkeys(details)))


def _known(names: Iterable[str], argument: str) -> set[str]:
    if isinstance(names, str):
        raise TypeError(f"ste_gradcheck: {argument} must be a list of names, got the string {names!r}")
    found = set(names)
    if problem := unknown_name(sorted(found), CHECKS, "check"):
        raise ValueError(f"ste_gradcheck: {argument}: {problem}")
    return found


def _cases(inputs: Any) -> list[Inputs]:
    cases = [inputs] if isinstance(inputs, tuple) else inputs
    if not isinstance(cases, list) or not cases or not all(isinstance(case, tuple) and case for case in cases):
        given = type(inputs).__name__
        raise TypeError(f"ste_gradcheck: inputs must be a tuple of tensors or a list of such tuples, got {given}")
    for slot, value in ((slot, value) for case in cases for slot, value in enumerate(case)):
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"ste_gradcheck: input {slot} must be a float64 tensor, got {kind}")
        if not value.numel():
            raise ValueError(f"ste_gradcheck: input {slot} has no elements, shape {tuple(value.shape)}")
    return [tuple(value.detach().clone() for value in case) for case in cases]


def _require_sound(estimator: Estimator, case: Inputs) -> None:
    # Refuses what cannot be checked at all; errors that the function itself raises pass unchanged
    if (estimator.surrogate is None) == (estimator.gradient is None):
        given = "neither surrogate nor gradient is" if estimator.gradient is None else "surrogate and gradient are both"
        raise ValueError(f"ste_gradcheck: {given} given: declare the gradient in one of them")
    for slot in estimator.broadcast:
        if not 0 < slot < len(case):
            raise ValueError(f"ste_gradcheck: broadcast names slot {slot}, but there are {len(case) - 1} parameters")
    copies = [tensor.clone() for tensor in case]
    y = estimator.function(*copies)
    for slot, (old, new) in enumerate(zip(case, copies, strict=True)):
        if not torch.equal(old.nan_to_num(), new.nan_to_num()):  # a NaN is not equal to itself
            raise ValueError(f"ste_gradcheck: function changes its input {slot} in place; let it compute a new tensor")
    if not isinstance(y, Tensor):
        raise TypeError(f"ste_gradcheck: function must return one tensor, got {type(y).__name__}")
    if estimator.surrogate is not None:
        other = estimator.surrogate(*case)
        if not isinstance(other, Tensor):
            raise TypeError(f"ste_gradcheck: surrogate must return one tensor, got {type(other).__name__}")
        if other.shape != y.shape:
            raise ValueError(
                f"ste_gradcheck: surrogate returns shape {tuple(other.shape)}, function returns {tuple(y.shape)}"
            )
    estimator.declared_gradients(case, torch.ones_like(y))


def grid_points(scale: float, zero_point: int, qmin: int, qmax: int) -> Tensor:
    """Return values of x at which the rules for an integer grid differ.

    x = scale * (q - zero_point) for q on both bounds, a quarter, a half and more inside and outside of them, far
    outside, at zero, and on ties of both parities (0.5 rounds down to the even 0, 1.5 up to the even 2). If float64
    has a suitable value, x / scale is exactly q - zero_point, so a tie is a tie for every scale. The values are
    float64, ascending, without duplicates. A scale that is not positive and finite, or qmin >= qmax, is a ValueError.

    >>> grid_points(0.5, 0, 0, 1).tolist()[6:15]
    [-0.25, -0.125, 0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.65]
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"grid_points: scale must be positive and finite, got {scale}")
    if qmin >= qmax:
        raise ValueError(f"grid_points: qmin must be below qmax, got qmin={qmin} and qmax={qmax}")
    span = qmax - qmin
    codes = {qmin - span - 3.3, qmax + span + 3.3}
    for sign in (-1, 1):
        codes |= {bound + sign * offset for bound in (qmin, qmax) for offset in BESIDE_A_BOUND}
        codes |= {zero_point + sign * offset for offset in BESIDE_ZERO}
    v = torch.tensor(sorted({code - zero_point for code in codes}), dtype=torch.float64)
    x = v * scale  # rounded: x / scale may miss v by a unit in the last place
    for neighbour in (x, torch.nextafter(x, x + scale), torch.nextafter(x, x - scale)):
        x = torch.where((x / scale != v) & (neighbour / scale == v), neighbour, x)
    return x
