"""Checks of every estimator besides `qat.testing.ste_gradcheck`: the NumPy reference and the properties.

Used by test_estimators.py (with Hypothesis) and estimator_matrix.py (with seeded samples). Each check raises
AssertionError. Excuses are checked too: what a case excuses must fail, so that no excuse outlives its reason.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from qat.testing import CheckResult, ste_gradcheck
from tests.references.estimator_case import PROPERTIES, Array, Case

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
FACTORS = (1.0, 0.5, 0.25, 0.5, 1.0, 0.25)
"""Parameters vary along an axis by these factors: powers of two, so ties stay ties; at most 1, so alphas stay valid."""

MANY = 40
"""A rule without a bound on its levels shows more levels than this over `spread` samples."""


def array(x: Tensor) -> Array:
    return x.detach().numpy()


def cotangent(shape: Sequence[int]) -> Array:
    """Uneven values of both signs, none 0, which reveal sums over wrong axes and rules that depend on the sign."""
    return np.random.default_rng(0).permutation(np.linspace(-1.5, 2.0, int(np.prod(shape)))).reshape(shape)


def varied(case: Case) -> Iterator[tuple[Tensor, ...]]:
    """The inputs of the case; then parameters that vary along each axis of x, and a parameter of shape (1,)."""
    yield case.inputs
    x, slots = case.inputs[0], [slot for slot in case.broadcast if case.inputs[slot].numel() == 1]
    shapes = [(1,) * axis + (size,) + (1,) * (x.ndim - axis - 1) for axis, size in enumerate(x.shape)]
    for shape in [*shapes, x.shape[-1:], (1,)] if slots else []:
        factors = torch.tensor(np.resize(FACTORS, shape))
        for chosen in [slots] + ([[slot] for slot in slots] if case.elementwise and len(slots) > 1 else []):
            yield tuple(each.reshape(()) * factors if slot in chosen else each for slot, each in enumerate(case.inputs))


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Array) -> tuple[Tensor | None, ...]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = function(*leaves)
    return torch.autograd.grad(y, leaves, torch.as_tensor(grad), allow_unused=True)


def reference(case: Case) -> None:
    for inputs in varied(case):
        y = case.function(*inputs)
        assert y.dtype == torch.float64 and y.shape == inputs[0].shape
        np.testing.assert_allclose(array(y), case.reference(*map(array, inputs)), **TIGHT)


def reference_gradient(case: Case) -> None:
    """Every gradient equals the published formula; None where the rule gives none."""
    for inputs in varied(case):
        grad = cotangent(inputs[0].shape)
        expected = case.reference_gradient(grad, *map(array, inputs))
        assert len(expected) == len(inputs), f"{case.name}: the reference has {len(expected)} slots"
        for slot, (got, wanted) in enumerate(zip(gradients(case.function, inputs, grad), expected, strict=True)):
            if wanted is None:
                assert got is None, f"{case.name}: slot {slot} gets a gradient, its rule gives none"
            else:
                # float() so that a wrong shape is a difference, not a broadcast
                assert np.shape(wanted) == inputs[slot].shape
                got = torch.zeros_like(inputs[slot]) if got is None and not np.any(wanted) else got
                assert got is not None, f"{case.name}: slot {slot} gets no gradient"
                np.testing.assert_allclose(array(got), wanted, **TIGHT, err_msg=f"{case.name}: slot {slot}")


def claim(case: Case) -> None:
    """The surrogate or declared gradient has the published gradient; it is checked because it is hand-written too."""
    for inputs in varied(case):
        grad = cotangent(inputs[0].shape)
        if case.surrogate is not None:
            claimed = gradients(case.surrogate, inputs, grad)
        else:
            assert case.gradient is not None, f"{case.name}: neither surrogate nor gradient"
            claimed = case.gradient(torch.as_tensor(grad), *inputs)
        for got, wanted in zip(claimed, case.reference_gradient(grad, *map(array, inputs)), strict=True):
            if got is None:
                assert wanted is None or not np.any(wanted)
            else:
                np.testing.assert_allclose(array(got), 0.0 if wanted is None else wanted, **TIGHT)


def at(case: Case, x: Array) -> Array:
    return array(case.function(torch.tensor(x), *case.inputs[1:]))


def idempotent(case: Case, x: Array) -> None:
    once = at(case, x)
    np.testing.assert_allclose(at(case, once), once, **TIGHT)


def monotone(case: Case, x: Array) -> None:
    """Up to rounding: a soft step may lose the last digit where two formulas meet."""
    y = at(case, x).ravel()[np.argsort(x.ravel())]
    assert (np.diff(y) >= -1e-13 * (1 + np.abs(y[1:]))).all(), f"falls by {-np.diff(y).min()}"


def sweep(case: Case) -> Array:
    """Dense samples of the whole domain and near 0, as a stack of tensors with the shape of x."""
    points, low, high = domain(case)
    even, near = np.linspace(low, high, 4000), max(-low, high) * np.logspace(-12, 0, 4000)
    dense = np.concatenate([even, near, -near if low < 0 else near, points])
    return np.resize(dense, (-(-dense.size // case.inputs[0].numel()), *case.inputs[0].shape))


def levels(case: Case, x: Array) -> None:
    """An elementwise rule is sampled over its whole domain; the levels of other rules depend on the tensor x."""
    assert case.levels is not None, f"{case.name}: no number of levels"
    distinct = np.unique(at(case, np.concatenate([x[None], sweep(case)]) if case.elementwise else x))
    assert len(distinct) <= case.levels, f"{len(distinct)} levels, {case.levels} allowed: {distinct}"


def zero(case: Case, x: Array) -> None:
    """Zeros of both signs stay zero among the other values of x."""
    x = x.copy()
    x.flat[0], x.flat[-1] = 0.0, -0.0
    y = at(case, x)
    assert y.flat[0] == 0 and y.flat[-1] == 0, f"0 gives {y.flat[0]}, -0 gives {y.flat[-1]}"


def outside(case: Case, x: Array) -> None:
    incoming = cotangent(x.shape)
    (grad, *_) = gradients(case.function, (torch.tensor(x), *case.inputs[1:]), incoming)
    assert grad is not None
    published = case.reference_gradient(incoming, x, *map(array, case.inputs[1:]))[0]
    wrong = (published == 0) & (array(grad) != 0)
    assert not wrong.any(), f"gradient {array(grad)[wrong]} outside, at {x[wrong]}"


PROPERTY_CHECKS: dict[str, Callable[[Case, Array], None]] = {
    "idempotent": idempotent, "monotone": monotone, "levels": levels, "zero": zero, "outside": outside,
}  # fmt: skip
assert tuple(PROPERTY_CHECKS) == PROPERTIES


def domain(case: Case) -> tuple[Array, float, float]:
    """The points of the case, and the interval that they span, widened by half; it stays positive if they are."""
    points = np.unique(array(case.inputs[0]))
    low, high = float(points.min()), float(points.max())
    return points, (low / 2 if low > 0 else 1.5 * low), 1.5 * high


def spread(case: Case) -> Iterator[Array]:
    """Seeded samples of x: the points, random points, uniform values, values near the median, many magnitudes."""
    generator, shape = np.random.default_rng(1), case.inputs[0].shape
    points, low, high = domain(case)
    yield array(case.inputs[0])
    for turn in range(1000):
        middle = np.median(np.abs(points)) * generator.standard_normal(shape)
        drawn = (
            generator.choice(points, shape),
            generator.uniform(low, high, shape),
            generator.choice((middle, generator.choice(points, shape)), axis=0),
            generator.choice(points, shape) * 10.0 ** generator.integers(-9, 10, shape),
        )[turn % 4]
        yield np.abs(drawn) if low > 0 else drawn


def holds(case: Case, name: str, samples: int = 24) -> None:
    for x in islice(spread(case), samples):
        PROPERTY_CHECKS[name](case, x)


def not_to_be_had(case: Case, name: str, samples: int = 120) -> None:
    """An excused property really fails: on some sample, by many levels, or by a gradient far outside."""
    if name == "levels":
        found = {float(y) for x in islice(spread(case), samples) for y in at(case, x).ravel()}
        bound = case.levels or MANY
        assert len(found) > bound, f"{case.name}: only {len(found)} levels"
        return
    if name == "outside":
        x = array(case.inputs[0])
        far = np.abs(x) >= np.quantile(np.abs(x), 0.75)
        both = [gradients(case.function, case.inputs, sign * np.ones(x.shape))[0] for sign in (1.0, -1.0)]
        assert any(grad is not None and array(grad)[far].any() for grad in both), f"{case.name}: 0 far outside"
        return
    for x in islice(spread(case), samples):
        try:
            PROPERTY_CHECKS[name](case, x)
        except AssertionError:
            return
    raise AssertionError(f"{case.name}: {name} is excused, but holds on {samples} samples")


def excuses(case: Case) -> dict[str, str]:
    """The excuses of the case, including those that follow from its fields."""
    found = dict(case.excused)
    if case.levels is None:
        found.setdefault("levels", "the rule bounds no number of levels")
    return found


def claimed(case: Case) -> tuple[str, ...]:
    return tuple(name for name in PROPERTIES if name not in excuses(case))


def gradcheck(case: Case, check: str) -> CheckResult:
    report = ste_gradcheck(case.function, case.surrogate, case.inputs, gradient=case.gradient, broadcast=case.broadcast,
                           elementwise=case.elementwise, checks=(check,))  # fmt: skip
    return report[check]
