"""Every estimator against its published rule: NumPy references, `ste_gradcheck`, properties, and torch's own operators.

One row of cases_uniform.py or cases_codebooks.py a test; the same rows make docs/estimators_matrix.md.
"""

import warnings

import cases_codebooks
import cases_uniform
import estimator_proof as proof
import numpy as np
import pytest
import torch
from estimator_case import PROPERTIES, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from qat.functional.affine import fake_quantize, lsq_plus_quantize
from qat.functional.clamping import clamp_ste
from qat.functional.ewgs import ewgs_gradient, ewgs_round
from qat.functional.learned_bits import bit_cost, learned_bits_quantize
from qat.functional.lsq import lsq_quantize
from qat.functional.power_of_two import power_of_two_scale
from qat.functional.rounding import stochastic_round_ste
from qat.functional.soft import dsq_round, soft_round
from qat.testing import CHECKS

CASES = [*cases_uniform.CASES, *cases_codebooks.CASES]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def test_rows_are_told_apart_and_leave_nothing_open():
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)
    for case in CASES:
        for name in PROPERTIES:
            assert (name in proof.claimed(case)) != (name in proof.excuses(case)), f"{case.name}: {name}"
        assert set(proof.excuses(case)) <= {*CHECKS, *PROPERTIES}, case.name


@EVERY
def test_forward_equals_the_published_formula(case: Case):
    proof.reference(case)


@EVERY
def test_gradients_equal_the_published_formula(case: Case):
    proof.reference_gradient(case)


@EVERY
def test_what_a_rule_is_checked_against_is_the_published_gradient(case: Case):
    proof.claim(case)


# The compiler takes half of the time, and CI proves all of it anyway with estimator_matrix.py.
SLOW = {"compile": [pytest.mark.slow]}


@pytest.mark.parametrize("check", [pytest.param(check, marks=SLOW.get(check, [])) for check in CHECKS])
@EVERY
def test_ste_gradcheck(case: Case, check: str):
    if check in case.excused:
        with pytest.raises(AssertionError):  # an excuse that is not needed hides what comes after it
            proof.gradcheck(case, check)
    else:
        proof.gradcheck(case, check)


def samples_of(case: Case) -> st.SearchStrategy[proof.Array]:
    points, low, high = proof.domain(case)
    near = float(2 * np.median(np.abs(points)))
    values = st.sampled_from(points.tolist()) | st.floats(low, high) | st.floats(max(low, -near), max(low, near))
    return hnp.arrays(np.float64, tuple(case.inputs[0].shape), elements=values, fill=st.nothing())


CLAIMS = [(case, name) for case in CASES for name in PROPERTIES if name in proof.claimed(case)]
FULL = [case for case in CASES if case.elementwise and case.levels is not None]
EXCUSES = [(case, name) for case in CASES for name in PROPERTIES if name in proof.excuses(case)]


@pytest.mark.parametrize(("case", "name"), CLAIMS, ids=lambda each: getattr(each, "name", each))
def test_property(case: Case, name: str):
    @FEW
    @given(samples_of(case))
    def holds(x: proof.Array) -> None:
        proof.PROPERTY_CHECKS[name](case, x)

    holds()
    proof.holds(case, name)


@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_every_level_is_reached(case: Case):
    assert len(np.unique(proof.at(case, proof.sweep(case)))) == case.levels


@pytest.mark.parametrize(("case", "name"), EXCUSES, ids=lambda each: getattr(each, "name", each))
def test_excused_property_really_fails(case: Case, name: str):
    proof.not_to_be_had(case, name)


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "positive_scale"], ids=lambda case: case.name)
def test_nan_stays_nan_infinity_gives_none_and_both_spare_their_neighbours(case: Case):
    usual = case.function(*case.inputs)
    x = case.inputs[0].clone().contiguous()
    x.view(-1)[1] = float("nan")
    y = case.function(x, *case.inputs[1:])
    assert y.reshape(-1)[1].isnan()
    if case.elementwise:
        x.view(-1)[2] = float("inf")
        y = case.function(x, *case.inputs[1:])
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y.reshape(-1)[3:], usual.reshape(-1)[3:])


def leaf(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()


def gradients(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    grad = torch.as_tensor(proof.cotangent(y.shape)).to(y.dtype)
    return list(torch.autograd.grad(y, leaves, grad))


def test_clamp_equals_torchs_between_and_beyond_crossed_bounds():
    """Everywhere but exactly on a bound and between equal ones, where torch's gradient depends on its version."""
    x = leaf([-3.0, -1.2, 0.3, 1.9, 2.5, 7.0])
    for low, high in ((-1.0, 2.0), (2.0, -1.0)):
        ours, theirs = ((leaf(low), leaf(high)) for _ in range(2))
        y, oracle = clamp_ste(x, *ours), torch.clamp(x, *theirs)
        assert torch.equal(y, oracle)
        for got, expected in zip(gradients(y, x, *ours), gradients(oracle, x, *theirs), strict=True):
            torch.testing.assert_close(got, expected)


def test_equal_bounds_share_what_they_hold_back():
    x, low, high = leaf([-3.0, 1.0, 7.0]), leaf(1.0), leaf(1.0)
    y = clamp_ste(x, low, high)
    y.backward(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    assert (y.tolist(), x.grad.tolist()) == ([1.0] * 3, [0.0, 2.0, 0.0])
    assert (low.grad.item(), high.grad.item()) == (1.0, 4.0)


def test_stochastic_rounding_is_right_on_average_and_never_off_by_one():
    generator = torch.Generator().manual_seed(3)
    for x in (0.1, -0.1, 2.5, -7.75, 3.0, -4.0):
        y = stochastic_round_ste(torch.full((40000,), x, dtype=torch.float64), generator)
        floor, fraction = np.floor(x), x - np.floor(x)
        assert set(y.unique().tolist()) == ({floor, floor + 1} if fraction else {x})
        # five standard deviations of the mean of so many coin tosses
        assert abs(y.mean().item() - x) <= 5 * np.sqrt(fraction * (1 - fraction) / 40000)


def test_stochastic_rounding_compiles_whole():
    """Of integers: they stay, whatever the noise."""
    x = leaf([-3.0, 0.0, 8.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, which differ between torch versions
        y = torch.compile(lambda x: stochastic_round_ste(x), fullgraph=True, backend="aot_eager")(x)
        y.backward(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert torch.equal(y, x) and x.grad.tolist() == [1.0, 2.0, 3.0]


def test_ewgs_before_lsq_is_ewgs_of_that_grid():
    x, scale, delta = leaf([-9.0, -2.0, -0.6, -0.3, 0.1, 0.4, 0.9, 9.0]), leaf(0.5), 0.3
    y = lsq_quantize(ewgs_gradient(x, scale, delta), scale, -8, 7)
    grad = proof.cotangent(y.shape)
    v = proof.array(x) / 0.5
    expected = grad * (1 + delta * np.sign(grad) * (v - np.rint(v))) * ((v >= -8) & (v <= 7))
    np.testing.assert_allclose(proof.array(gradients(y, x)[0]), expected, **proof.TIGHT)
    tangent = torch.ones_like(x)
    for function in (lambda x: ewgs_round(x, delta), lambda x: ewgs_gradient(x, scale.detach(), delta)):
        assert torch.equal(torch.func.jvp(function, (x.detach(),), (tangent,))[1], tangent)


def test_soft_round_lies_between_the_identity_and_rounding():
    x = leaf([-2.7, -1.0, -0.51, -0.49, 0.0, 0.2, 0.49, 0.51, 0.9, 3.0])
    offset = proof.array(x) - np.floor(proof.array(x)) - 0.5
    flat, steep = leaf(1e-3), leaf(1e4)
    soft, hard = soft_round(x, flat), soft_round(x, steep)
    np.testing.assert_allclose(proof.array(soft), proof.array(x), atol=1e-6)
    assert torch.equal(hard, torch.round(x))
    # The first term of the series: offset + offset (1 - 4 offset^2) T^2 / 48; the terms of the formula cancel here.
    series = 1e-3 * offset * (1 - 4 * offset**2) / 24
    got = [torch.autograd.grad(y, flat, retain_graph=True)[0].item() for y in soft]
    np.testing.assert_allclose(got, series, rtol=1e-6, atol=1e-16)
    for gradient in (*gradients(soft, x), *gradients(hard, x, steep)):
        assert gradient.isfinite().all()
    np.testing.assert_allclose(proof.array(torch.autograd.grad(soft_round(x, 1e-3).sum(), x)[0]), 1, atol=1e-6)


def test_soft_round_and_dsq_have_the_derivatives_of_their_curves():
    """Finite differences see these two: no rounding is in the way. Away from the joints."""
    x = leaf([-2.7, -0.5, 0.1, 0.45, 0.9])
    for temperature in (0.01, 1.0, 20.0):
        assert torch.autograd.gradcheck(soft_round, (x, leaf(temperature)), eps=1e-6, atol=1e-6)
    # DSQ's curve is the soft one at the temperature 2 log(2 / alpha - 1)
    alpha = leaf(0.3)
    ours = gradients(dsq_round(x, alpha), x, alpha)
    curve = gradients(soft_round(x, 2 * torch.log(2 / alpha - 1)), x, alpha)
    for got, expected in zip(ours, curve, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("signed", "bits"), [(True, 2.0), (True, 4.4), (True, 8.0), (False, 1.0), (False, 3.7)])
def test_learned_bits_is_lsq_on_the_step_that_it_declares(signed, bits):
    whole = round(bits)
    qmax = 2 ** (whole - signed) - 1
    x, reach, width = leaf(np.linspace(-3.1, 3.1, 40)), leaf(2.1), leaf(bits)
    y = learned_bits_quantize(x, reach, width, signed, 0.25)
    step = leaf(2.1 / qmax)
    oracle = lsq_quantize(x, step, -qmax if signed else 0, qmax)
    torch.testing.assert_close(y, oracle)
    to_x, to_reach, to_bits = gradients(y, x, reach, width)
    lsq_to_x, lsq_to_step = gradients(oracle, x, step)
    assert torch.equal(to_x, lsq_to_x)
    torch.testing.assert_close(to_reach, 0.25 * lsq_to_step / qmax)
    # With n real, the step falls by reach * qmax'(n) / qmax^2; central differences of reach / (2^n - 1)
    slope = (2.1 / (2 ** (whole - signed + 1e-6) - 1) - 2.1 / (2 ** (whole - signed - 1e-6) - 1)) / 2e-6
    inside = torch.as_tensor(proof.cotangent(x.shape)) * (x.abs() <= 2.1 if signed else (x >= 0) & (x <= 2.1))
    expected = 0.25 * slope * (inside * (oracle - x) / step).sum()
    torch.testing.assert_close(to_bits, expected, rtol=1e-6, atol=1e-9)


def test_bit_cost_counts_whole_bits_and_learns_their_number():
    bits = leaf([2.0, 3.5, 4.5, 7.9])
    cost = bit_cost(bits, 100)
    assert cost.tolist() == [200, 400, 400, 800]
    assert torch.autograd.grad(cost.sum(), bits)[0].tolist() == [100.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_stay_and_others_go_to_the_nearest_or_up(dtype):
    exponents = torch.arange(-100, 100)
    powers = torch.ldexp(torch.ones(200, dtype=dtype), exponents)
    for rounding in ("nearest", "up"):
        assert torch.equal(power_of_two_scale(powers, rounding), powers)
    for factor, nearest, up in ((1.0 + 4e-7, 1, 2), (1.4142, 1, 2), (1.4143, 2, 2), (1.9999, 2, 2)):
        assert torch.equal(power_of_two_scale(powers * factor), powers * nearest)
        assert torch.equal(power_of_two_scale(powers * factor, "up"), powers * up)


@pytest.mark.parametrize("per_channel", [False, True])
def test_lsq_plus_equals_torchs_learnable_operator_where_that_is_right(per_channel):
    """Not for negative zero points (its backward truncates them), nor within half a step beyond a bound (its mask is
    taken on the rounded value). float32 is all that it takes.
    """
    v = torch.tensor([[-30.0, -4.75, -2.9, -0.3, 0.0, 2.2, 11.75, 30.0], [-3.9, -1.3, 0.6, 1.2, 7.7, 10.0, 13.8, 90.0]])
    scale = torch.tensor([0.25, 2.0] if per_channel else [0.25], requires_grad=True)
    zero = torch.tensor([3.0, 2.0] if per_channel else [3.0], requires_grad=True)
    x = (v * scale.detach()[:, None]).requires_grad_()
    y = lsq_plus_quantize(x, scale[:, None], zero[:, None], 0, 15)
    if per_channel:
        oracle = torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 0, 0, 15, 1.0)
    else:
        oracle = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, 0, 15, 1.0)
    assert torch.equal(y, oracle)
    for got, expected in zip(gradients(y, x, scale, zero), gradients(oracle, x, scale, zero), strict=True):
        torch.testing.assert_close(got, expected)


def test_fake_quantize_has_the_gradient_of_torchs_outside_half_a_step():
    x = torch.tensor([-9.0, -4.6, -2.9, -0.5, 0.3, 2.5, 10.9, 12.7, 50.0], requires_grad=True)
    y = fake_quantize(x, torch.tensor(1.0), torch.tensor(4), 0, 15)
    oracle = torch.fake_quantize_per_tensor_affine(x, 1.0, 4, 0, 15)
    assert torch.equal(y, oracle)
    assert torch.equal(gradients(y, x)[0], gradients(oracle, x)[0])
