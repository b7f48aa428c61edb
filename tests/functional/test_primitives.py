"""What the matrix of test_estimators.py cannot say of roundings, clamp, signs, EWGS, soft steps and the positive scale:
defaults, extreme parameters, narrow types, random noise.
"""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nan

from qat.functional.clamping import clamp_ste
from qat.functional.codebooks.binary import binary_quantize
from qat.functional.ewgs import ewgs_round
from qat.functional.rounding import StochasticRoundSTEFunction, stochastic_round_ste
from qat.functional.sign import error_decay_sign, sign_ste, ternary_sign_ste
from qat.functional.soft import dsq_round, soft_round
from qat.functional.tensors import apply, positive_scale
from tests.references import estimator_proof as proof
from tests.references.leaves import cotangent, gradients, leaf

inf = math.inf
# Inside, outside, on bounds and thresholds, on ties of both parities, on integers.
X = (-3.7, -2.5, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.3, 0.5, 0.6, 1.0, 1.25, 1.5, 2.5, 4.0, 7.25)


@pytest.mark.parametrize(("call", "expected", "slopes"), [
    (sign_ste, (-1, -1, 1, 1, 1), (0, 1, 1, 1, 0)),
    (ternary_sign_ste, (-1, -1, 0, 0, 1), (0, 1, 1, 1, 0)),
    (lambda x: ternary_sign_ste(x, 0.0), (-1, -1, 0, 1, 1), (0, 1, 1, 1, 0)),
    (lambda x: ternary_sign_ste(x, 2.0), (0, 0, 0, 0, 0), (0, 1, 1, 1, 0)),
    (lambda x: clamp_ste(x, -1, 0.5), (-1, -1, 0, 0.5, 0.5), (0, 1, 1, 1, 0)),
])  # fmt: skip
def test_defaults_and_thresholds_that_are_numbers(call, expected, slopes):
    x = leaf([-1.5, -1.0, 0.0, 0.5, 1.5])
    y = call(x)
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist()) == (list(expected), list(slopes))


@pytest.mark.parametrize(("function", "value"), [
    (error_decay_sign, 0.4),
    (soft_round, 5.0),
    (dsq_round, 0.2),
    (ternary_sign_ste, 0.6),
])  # fmt: skip
def test_a_parameter_may_be_a_number(function, value):
    x, parameter = leaf(X), torch.tensor(value, dtype=torch.float64)
    y, expected = function(x, value), function(x, parameter)
    assert torch.equal(y, expected) and torch.equal(gradients(y, x)[0], gradients(expected, x)[0])


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


def test_clamped_values_lie_inside_in_narrow_types_too():
    """0.1 and 0.3 have no exact bfloat16: the bound is what they round to, not what they were."""
    x = leaf([-1.0, 0.2, 1.0], torch.bfloat16)
    once = clamp_ste(x, 0.1, 0.3).detach().requires_grad_()
    for bounds in ((0.1, 0.3), (torch.tensor([0.1]), torch.tensor([0.3]))):
        assert torch.autograd.grad(clamp_ste(once, *bounds).sum(), once)[0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_positive_scale_is_positive_and_finite_and_learns_back(dtype):
    raw = leaf([0.5, -3.0, 0.0, -0.0, nan, -inf, inf, 1e30 if dtype.itemsize > 2 else 6e4], dtype)
    scale = positive_scale(raw)
    assert scale.isfinite().all() and (scale > 0).all() and (1 / scale.float()).isfinite().all()
    assert scale[0].item() == 0.5 and (scale[1:6] <= 1e-4).all() and (scale[6:] > 1e3).all()
    # A descent step goes against the gradient: one that raises a scale always passes, one that lowers it only above.
    scale.backward(torch.full_like(scale, -2.0), retain_graph=True)
    assert raw.grad.tolist() == [-2.0] * 8
    raw.grad = None
    scale.backward(torch.full_like(scale, 2.0))
    assert raw.grad.tolist() == [2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 2.0, 2.0]


def test_ewgs_differentiated_by_the_gradient_gives_the_bracket():
    x, grad = leaf([0.25, 0.25, 0.25]), leaf([3.0, -3.0, 0.0])
    (grad_x,) = torch.autograd.grad(ewgs_round(x, 0.5), x, grad, create_graph=True)
    (bracket,) = torch.autograd.grad(grad_x.sum(), grad)
    assert bracket.tolist() == [1.125, 0.875, 1.0]


def soft_reference(x: np.ndarray, temperature: float) -> np.ndarray:
    """The formula of the docstring, in sigmoids and NumPy's widest float."""
    x, t = x.astype(np.longdouble), np.longdouble(temperature)

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    lowest, highest = sigmoid(-t / 2), sigmoid(t / 2)
    return np.floor(x) + (sigmoid(t * (x - np.floor(x) - 0.5)) - lowest) / (highest - lowest)


@pytest.mark.parametrize("temperature", [1e-3, 0.03, 0.999, 1.0, 7.0, 60.0, 1e4])
def test_soft_round_equals_the_formula_at_every_temperature(temperature):
    x, t = leaf(X), leaf(temperature)
    y = soft_round(x, t)
    values, grad = proof.array(x), cotangent(y).numpy()
    np.testing.assert_allclose(proof.array(y), soft_reference(values, temperature), rtol=1e-12, atol=1e-12)
    grad_x, grad_t = gradients(y, x, t)
    narrow_x, narrow_t = leaf(X, torch.float32), leaf(temperature, torch.float32)
    narrow = gradients(soft_round(narrow_x, narrow_t), narrow_x, narrow_t)
    # the difference of two values loses digits as T falls, but the slope is then nearly linear in T
    step = np.longdouble(1e-5 if temperature > 0.01 else 0.05) * temperature
    up, down = (soft_reference(values, np.longdouble(temperature) + side) for side in (step, -step))
    np.testing.assert_allclose(grad_t.item(), float((grad * (up - down)).sum() / (2 * step)), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(narrow[1].item(), grad_t.item(), rtol=1e-4, atol=1e-12)
    step = np.longdouble(1e-5) / max(temperature, 1.0)
    up, down = (soft_reference(values + side, temperature) for side in (step, -step))
    np.testing.assert_allclose(grad_x.numpy(), (grad * (up - down) / (2 * step)).astype(float), rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(narrow[0].numpy(), grad_x.numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-5)])
def test_the_slope_by_a_small_temperature_is_not_lost(dtype, tolerance):
    """To second order in T the step is d (1 + T^2 (1/16 - d^2/4) / 3), so its slope is d T (1/4 - d^2) / 6."""
    d, t = torch.tensor([-0.4, -0.25, 0.125, 0.45], dtype=dtype), leaf(1e-3, dtype)
    rows = [torch.autograd.grad(soft_round(value + 0.5, t), t)[0] for value in d]
    torch.testing.assert_close(torch.stack(rows), d * 1e-3 * (0.25 - d.square()) / 6, rtol=tolerance, atol=0)


def test_soft_round_goes_from_the_identity_to_rounding():
    x = torch.tensor([-1.75, -0.3, 0.0, 0.45, 0.55, 3.0, 8388609.0])
    torch.testing.assert_close(soft_round(x, 1e-3), x)
    assert torch.equal(soft_round(x, 1e4), torch.round(x))
    integers = torch.arange(-5.0, 6.0)
    for temperature in (1e-3, 0.7, 3.0, 50.0):
        assert torch.equal(soft_round(integers, temperature), integers)
    assert (soft_round(torch.linspace(-2, 2, 4001), 6.0).diff() > 0).all()


def test_dsq_near_the_ends_of_alpha():
    x = leaf([0.25, 0.5, 2.0], torch.float32)
    dsq_round(x, 1 - 1e-6).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3))
    x.grad, alpha = None, leaf([1e-6, 1 - 1e-6], torch.float32)
    dsq_round(x[:, None].expand(3, 2), alpha).sum().backward()
    assert x.grad.isfinite().all() and alpha.grad.isfinite().all()
    # near 1 phi is d + 4 d (1 - alpha)^2 (1/4 - d^2) / 3 + 1/2 to second order, so its slope by alpha is
    alpha, d = leaf(1 - 3 * 2**-24, torch.float32), 0.25
    dsq_round(torch.tensor(d + 0.5), alpha).backward()
    torch.testing.assert_close(alpha.grad.item(), -8 * d * 2**-24 * (0.25 - d * d), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("progress", "v"), [(0.37, -9.0), (0.5, -9.0), (0.5, 9.0), (1.0, -1.5), (1.0, 0.3)])
@pytest.mark.parametrize("estimator", [
    error_decay_sign,
    lambda x, progress: binary_quantize(x, None, "error_decay", progress),
], ids=["error_decay_sign", "binary_quantize"])  # fmt: skip
def test_the_error_decay_keeps_its_digits_in_the_tails(estimator, progress, v):
    """1 - tanh(z)^2 as a difference has none left: half a digit at z = 9, then 0."""
    x = torch.tensor([v], requires_grad=True)
    estimator(x, torch.tensor(progress)).sum().backward()
    t = 0.1 * 10 ** (2 * progress)
    expected = max(1 / t, 1) * t / math.cosh(t * v) ** 2
    assert x.grad.item() == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [-1.75, -0.125, 0.25, 3.5, 7.0, 1 / 4096])
def test_stochastic_rounding_is_unbiased(value, dtype):
    """1/4096 in float16: noise drawn in float16, on multiples of 1/2048, would give twice as many ones."""
    n = 1_000_000 if value == 1 / 4096 else 40_000
    y = stochastic_round_ste(torch.full((n,), value, dtype=dtype), torch.Generator().manual_seed(0))
    assert y.dtype == dtype
    assert set(y.tolist()) == {math.floor(value), math.ceil(value)}
    fraction = value - math.floor(value)
    five_deviations = 5 * math.sqrt(fraction * (1 - fraction) / n)
    assert abs(y.double().mean().item() - value) <= five_deviations


def test_stochastic_rounding_repeats_with_its_generator():
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    first, second = (stochastic_round_ste(x, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(5)
    draws = [stochastic_round_ste(x, generator) for _ in range(2)]
    assert torch.equal(draws[0], first) and not torch.equal(draws[1], first)
    torch.manual_seed(5)
    assert torch.equal(stochastic_round_ste(x), first)


def test_stochastic_rounding_goes_up_where_noise_is_small():
    """Noise can be exactly 0, and a fraction of 1 - 1e-30 is 1: an integer stays where it is all the same."""
    x, noise = torch.tensor([2.0, 0.25, 0.25, -0.25, -1e-30]), torch.tensor([0.0, 0.2, 0.25, 0.7, 0.3])
    assert apply(StochasticRoundSTEFunction, x, noise).tolist() == [2.0, 1.0, 0.0, 0.0, 0.0]


def test_stochastic_rounding_compiles_whole():
    x = leaf([-3.0, 0.0, 8.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, which differ between torch versions
        y = torch.compile(lambda x: stochastic_round_ste(x), fullgraph=True, backend="aot_eager")(x)
        y.backward(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert torch.equal(y, x) and x.grad.tolist() == [1.0, 2.0, 3.0]


def test_vmap_draws_the_noise_as_its_randomness_says():
    rows = torch.full((2, 64), 0.5)
    same, different = (torch.func.vmap(stochastic_round_ste, randomness=mode)(rows) for mode in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
