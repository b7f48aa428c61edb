"""Roundings, clamp, signs, EWGS and soft steps: values and slopes computed by hand, every option, every transform."""

import math
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nan

from qat.functional.clamping import clamp_ste
from qat.functional.codebooks.binary import binary_quantize
from qat.functional.ewgs import ewgs_gradient, ewgs_round
from qat.functional.lsq import lsq_quantize
from qat.functional.rounding import (
    StochasticRoundSTEFunction,
    ceil_ste,
    floor_ste,
    round_ste,
    stochastic_round_ste,
    trunc_ste,
)
from qat.functional.sign import error_decay_sign, sign_ste, ternary_sign_ste
from qat.functional.soft import dsq_round, soft_round
from qat.functional.tensors import apply

inf = math.inf
# Inside, outside, on bounds and thresholds, on ties of both parities, on integers.
X = (-3.7, -2.5, -2.0, -1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.3, 0.5, 0.6, 1.0, 1.25, 1.5, 2.5, 4.0, 7.25)


def leaf(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).clone().requires_grad_()


def numbers(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def cotangent(x: Tensor) -> Tensor:
    """An uneven gradient of both signs, so that a sum over the wrong axes and a lost sign show."""
    return torch.linspace(-2.0, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)


def seeded_stochastic_round(x: Tensor) -> Tensor:
    return stochastic_round_ste(x, torch.Generator(x.device).manual_seed(3) if x.device.type == "cpu" else None)


@dataclass(frozen=True)
class Rule:
    """A function of x and parameters, and how many of the leading inputs it has a gradient for."""

    function: object
    parameters: tuple[float, ...] = ()
    learned: int = 1


RULES = {
    "round": Rule(round_ste),
    "floor": Rule(floor_ste),
    "ceil": Rule(ceil_ste),
    "trunc": Rule(trunc_ste),
    "clamp": Rule(clamp_ste, (-1.0, 1.5), 3),
    "clamp, straight through": Rule(partial(clamp_ste, gradient="straight_through"), (-1.0, 1.5), 3),
    "clamp, numbers": Rule(partial(clamp_ste, low=-1, high=1.5)),
    "sign, clipped": Rule(sign_ste),
    "sign, straight through": Rule(partial(sign_ste, gradient="straight_through")),
    "sign, approximate": Rule(partial(sign_ste, gradient="approximate")),
    "sign, error decay": Rule(error_decay_sign, (0.4,)),
    "sign, error decay, a number": Rule(partial(error_decay_sign, progress=0.4)),
    "ternary sign, clipped": Rule(ternary_sign_ste, (0.6,)),
    "ternary sign, straight through": Rule(partial(ternary_sign_ste, gradient="straight_through")),
    "ewgs round": Rule(ewgs_round, (0.2,)),
    "ewgs round, a number": Rule(partial(ewgs_round, delta=0.2)),
    "ewgs gradient": Rule(ewgs_gradient, (0.4, 0.2)),
    "soft round": Rule(soft_round, (5.0,), 2),
    "soft round, a number": Rule(partial(soft_round, temperature=5.0)),
    "dsq round": Rule(dsq_round, (0.2,), 2),
    "dsq round, a number": Rule(partial(dsq_round, alpha=0.2)),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
differentiable = pytest.mark.parametrize("name", ["soft round", "dsq round", "sign, approximate", "sign, error decay"])


def inputs_of(rule: Rule, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x = torch.tensor(X, dtype=dtype).reshape(3, 6)
    parameters = [torch.tensor(value, dtype=dtype) for value in rule.parameters]
    return [leaf(value, dtype) if slot < rule.learned else value for slot, value in enumerate([x, *parameters])]


def gradients(rule: Rule, inputs: list[Tensor], function: object = None) -> list[Tensor]:
    y = (function or rule.function)(*inputs)
    return [y, *torch.autograd.grad(y, inputs[: rule.learned], cotangent(y))]


# name, x -> y and dy/dx, all by hand
EDGES = [
    (round_ste, (0.5, 1.5, -0.5, -2.5, 3.0, 2.51), (0, 2, 0, -2, 3, 3), (1,) * 6),
    (floor_ste, (0.5, -0.5, 3.0, -3.0, 0.999), (0, -1, 3, -3, 0), (1,) * 5),
    (ceil_ste, (0.5, -0.5, 3.0, -3.0, 0.001), (1, 0, 3, -3, 1), (1,) * 5),
    (trunc_ste, (0.5, -0.5, 3.0, -3.7, 2.999), (0, 0, 3, -3, 2), (1,) * 5),
    (RULES["clamp, numbers"].function, (-1.25, -1.0, 0.0, 1.5, 1.75), (-1, -1, 0, 1.5, 1.5), (0, 1, 1, 1, 0)),
    (partial(clamp_ste, low=2.0, high=2.0), (1.0, 2.0, 3.0), (2, 2, 2), (0, 1, 0)),
    (
        partial(clamp_ste, low=-1.0, high=1.0, gradient="straight_through"),
        (-2.0, -1.0, 0.5, 9.0),
        (-1, -1, 0.5, 1),
        (1,) * 4,
    ),
    (sign_ste, (-1.5, -1.0, -0.5, -0.0, 0.0, 1.0, 1.5), (-1, -1, -1, 1, 1, 1, 1), (0, 1, 1, 1, 1, 1, 0)),
    (partial(sign_ste, gradient="straight_through"), (-9.0, 0.0, 9.0), (-1, 1, 1), (1, 1, 1)),
    (
        partial(sign_ste, gradient="approximate"),
        (-1.5, -1.0, -0.75, 0.0, 0.25, 1.0, 1.5),
        (-1, -1, -1, 1, 1, 1, 1),
        (0, 0, 0.5, 2, 1.5, 0, 0),
    ),
    (
        ternary_sign_ste,
        (-1.5, -1.0, -0.5, 0.0, 0.5, 0.51, 1.0, 1.5),
        (-1, -1, 0, 0, 0, 1, 1, 1),
        (0, 1, 1, 1, 1, 1, 1, 0),
    ),
    (partial(ternary_sign_ste, threshold=0.0), (-0.1, 0.0, 0.1), (-1, 0, 1), (1, 1, 1)),
    (
        partial(ternary_sign_ste, threshold=2.0, gradient="straight_through"),
        (-3.0, -2.0, 2.0, 2.5),
        (-1, 0, 0, 1),
        (1,) * 4,
    ),
    # g = 1: 1 + 0.5 * (x - round(x)); a tie goes to the even neighbour and so does its residual
    (partial(ewgs_round, delta=0.5), (0.25, 0.5, 1.5, -0.25, 2.0), (0, 0, 2, 0, 2), (1.125, 1.25, 0.75, 0.875, 1)),
    # v = x / 2
    (partial(ewgs_gradient, scale=2.0, delta=0.5), (0.5, 1.0, 3.0, 4.0), (0.5, 1, 3, 4), (1.125, 1.25, 0.75, 1)),
    # T/4 = 1, at r = 0 and 1/2: dy/dr = T (1 - tanh(T (r - 1/2) / 2)^2) / (4 tanh(T/4))
    (
        partial(soft_round, temperature=4.0),
        (-1.0, 0.5, 2.0, 2.5),
        (-1, 0.5, 2, 2.5),
        (0.5514411, 1.3130353, 0.5514411, 1.3130353),
    ),
    # alpha = 1/2: k = log(3), s = 2: phi'(0) = (s k / 2) (1 - (1 - alpha)^2) = 0.75 log(3), phi'(1/2) = log(3)
    (partial(dsq_round, alpha=0.5), (1.0, 0.5, -0.5, 1.5), (1, 0, 0, 2), (0.8239592, 1.0986123, 1.0986123, 1.0986123)),
    # progress 0: t = 0.1, k = 10; progress 1: t = 10, k = 1
    (partial(error_decay_sign, progress=0.0), (-10.0, 0.0, 10.0), (-1, 1, 1), (0.4199743, 1, 0.4199743)),
    (partial(error_decay_sign, progress=1.0), (-0.1, 0.0, 3.0), (-1, 1, 1), (4.1997434, 10, 0)),
]


@pytest.mark.parametrize(
    ("function", "values", "expected", "slopes"), EDGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_values_and_slopes_by_hand(function, values, expected, slopes):
    x = leaf(values)
    y = function(x)
    y.sum().backward()
    np.testing.assert_allclose(numbers(y), expected, rtol=1e-7)
    np.testing.assert_allclose(numbers(x.grad), slopes, rtol=1e-7, atol=1e-12)


INFINITE = {
    "clamp": (-1.0, 1.5),
    "clamp, straight through": (-1.0, 1.5),
    "clamp, numbers": (-1.0, 1.5),
    **{name: (-1.0, 1.0) for name in RULES if "sign" in name},
}


@pytest.mark.parametrize("name", RULES)
def test_nan_stays_nan_and_infinities_harm_no_neighbour(name):
    rule = RULES[name]
    x = leaf([nan, -inf, 0.3, inf])
    inputs = [x, *inputs_of(rule)[1:]]
    y = rule.function(*inputs)
    low, high = INFINITE.get(name, (-inf, inf))
    assert y[0].isnan() and (y[1].item(), y[3].item()) == (low, high)
    alone = [leaf([0.3]), *inputs[1:]]
    outer = torch.ones_like(y).requires_grad_()
    (grad,) = torch.autograd.grad(y, x, outer, create_graph=True)
    (grad_alone,) = torch.autograd.grad(rule.function(*alone).sum(), alone[0])
    assert grad[2] == grad_alone[0] and grad[1:].isfinite().all()
    for second in torch.autograd.grad(grad[1:].sum(), (x, outer), allow_unused=True):
        assert second is None or second[1:].isfinite().all()


def test_a_nan_threshold_or_bound_is_not_swallowed():
    x = torch.tensor([0.0, 2.0])
    assert ternary_sign_ste(x, torch.tensor(nan)).isnan().all()
    assert clamp_ste(x, torch.tensor(nan), 1.0).isnan().all()


def test_clamp_gives_each_bound_the_gradient_of_what_it_cuts_off():
    x, low, high = leaf([[-3.0, -1.0, 0.0], [0.5, 3.0, 4.0]]), leaf([[-1.0], [2.5]]), leaf([1.0, 2.0, 3.0])
    y = clamp_ste(x, low, high)
    # row 2: low = 2.5 exceeds the high of the first two columns, where high wins, for x below both bounds too
    assert y.tolist() == [[-1.0, -1.0, 0.0], [1.0, 2.0, 3.0]]
    assert torch.equal(y, torch.clamp(x, low, high))
    y.backward(torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]))
    assert x.grad.tolist() == [[0.0, 2.0, 4.0], [0.0, 0.0, 0.0]]
    assert low.grad.tolist() == [[1.0], [0.0]]
    assert high.grad.tolist() == [8.0, 16.0, 32.0]


def test_clamped_values_lie_inside_in_narrow_types_too():
    """0.1 and 0.3 have no exact bfloat16: the bound is what they round to, not what they were."""
    x = leaf([-1.0, 0.2, 1.0], torch.bfloat16)
    once = clamp_ste(x, 0.1, 0.3).detach().requires_grad_()
    clamp_ste(once, 0.1, 0.3).sum().backward()
    assert once.grad.tolist() == [1.0, 1.0, 1.0]
    once.grad = None
    clamp_ste(once, torch.tensor([0.1]), torch.tensor([0.3])).sum().backward()
    assert once.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_float32_bound_of_narrow_values_gets_its_gradient_in_float32():
    """bfloat16 has no 4097."""
    high = leaf(1.0, torch.float32)
    clamp_ste(torch.full((4097,), 2.0, dtype=torch.bfloat16), -1.0, high).sum().backward()
    assert high.grad == 4097 and high.grad.dtype == torch.float32


def test_ewgs_scales_by_the_sign_of_the_gradient():
    x = leaf([0.25, 0.25, -0.25, -0.25, 0.25])
    ewgs_round(x, 0.5).backward(torch.tensor([2.0, -2.0, 2.0, -2.0, 0.0]))
    assert x.grad.tolist() == [2.25, -1.75, 1.75, -2.25, 0.0]


def test_ewgs_differentiated_by_the_gradient_gives_the_bracket_and_one_at_zero():
    x, grad = leaf([0.25, 0.25, 0.25]), leaf([3.0, -3.0, 0.0])
    (grad_x,) = torch.autograd.grad(ewgs_round(x, 0.5), x, grad, create_graph=True)
    (bracket,) = torch.autograd.grad(grad_x.sum(), grad)
    assert bracket.tolist() == [1.125, 0.875, 1.0]


def test_ewgs_before_a_uniform_quantizer_is_ewgs():
    """x / scale = 0.25, 7.25 (clipped), -1.75: the integer quantizer's mask, times the bracket inside."""
    x, scale, delta = leaf([0.125, 3.625, -0.875]), leaf(0.5), torch.tensor(0.5)
    y = lsq_quantize(ewgs_gradient(x, scale, delta), scale, -8, 7)
    y.sum().backward()
    assert y.tolist() == [0.0, 3.5, -1.0]
    assert x.grad.tolist() == [1.125, 0.0, 1.125]
    plain = leaf(0.5)
    lsq_quantize(x.detach(), plain, -8, 7).sum().backward()
    assert scale.grad == plain.grad


def test_ewgs_takes_a_delta_for_every_channel():
    x = leaf([[0.25, -0.25], [0.25, -0.25]])
    ewgs_round(x, torch.tensor([[0.0], [0.5]])).sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0], [1.125, 0.875]]


def soft_reference(x: np.ndarray, temperature: float) -> np.ndarray:
    """The formula of the docstring, in sigmoids and NumPy's widest float."""
    x, t = x.astype(np.longdouble), np.longdouble(temperature)

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    lowest, highest = sigmoid(-t / 2), sigmoid(t / 2)
    return np.floor(x) + (sigmoid(t * (x - np.floor(x) - 0.5)) - lowest) / (highest - lowest)


@pytest.mark.parametrize("temperature", [1e-3, 0.03, 0.999, 1.0, 7.0, 60.0, 1e4])
def test_soft_round_and_its_slopes_equal_the_formula_at_every_temperature(temperature):
    x, t = leaf(X), leaf(temperature)
    y = soft_round(x, t)
    np.testing.assert_allclose(
        numbers(y), soft_reference(numbers(x), temperature).astype(float), rtol=1e-12, atol=1e-12
    )
    grad_x, grad_t = torch.autograd.grad(y, (x, t), cotangent(y))
    narrow_x, narrow_t = leaf(X, torch.float32), leaf(temperature, torch.float32)
    narrow = torch.autograd.grad(soft_round(narrow_x, narrow_t), (narrow_x, narrow_t), cotangent(narrow_x))
    # the difference of two values loses digits as T falls, but the slope is then nearly linear in T
    step = np.longdouble(1e-5 if temperature > 0.01 else 0.05) * temperature
    up, down = (soft_reference(numbers(x), np.longdouble(temperature) + side) for side in (step, -step))
    difference = (numbers(cotangent(y)) * (up - down)).sum() / (2 * step)
    np.testing.assert_allclose(grad_t.item(), float(difference), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(narrow[1].item(), grad_t.item(), rtol=1e-4, atol=1e-12)
    step = np.longdouble(1e-5) / max(temperature, 1.0)
    slopes = (soft_reference(numbers(x) + step, temperature) - soft_reference(numbers(x) - step, temperature)) / (
        2 * step
    )
    np.testing.assert_allclose(numbers(grad_x), (numbers(cotangent(y)) * slopes).astype(float), rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(numbers(narrow[0]), numbers(grad_x), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-5)])
def test_the_slope_by_a_small_temperature_is_not_lost_in_cancellation(dtype, tolerance):
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
    dense = soft_round(torch.linspace(-2, 2, 4001), 6.0)
    assert (dense.diff() > 0).all()


def test_dsq_slopes_equal_the_papers_formula():
    x, alpha = leaf(X), leaf(0.3)
    y = dsq_round(x, alpha)
    grad_x, grad_alpha = torch.autograd.grad(y, (x, alpha), cotangent(y))
    oracle_x, oracle_alpha = leaf(X), leaf(0.3)
    r = oracle_x - torch.floor(oracle_x)
    phi = (torch.tanh(torch.log(2 / oracle_alpha - 1) * (r - 0.5)) / (1 - oracle_alpha) + 1) / 2
    expected = torch.autograd.grad(phi, (oracle_x, oracle_alpha), cotangent(y))
    torch.testing.assert_close((grad_x, grad_alpha), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(y, torch.round(x))


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


def approximate_surrogate(x: Tensor) -> Tensor:
    return torch.where(x.abs() <= 1, x * (2 - x.abs()), torch.sign(x).detach())


def error_decay_surrogate(x: Tensor, progress: Tensor) -> Tensor:
    t = 0.1 * 10 ** (2 * progress)
    return torch.clamp(1 / t, min=1) * torch.tanh(t * x)


def dsq_surrogate(x: Tensor, alpha: Tensor) -> Tensor:
    r = x - torch.floor(x)
    return (torch.tanh(torch.log(2 / alpha - 1) * (r - 0.5)) / (1 - alpha) + 1) / 2


def soft_surrogate(x: Tensor, t: Tensor) -> Tensor:
    r = x - torch.floor(x)
    return (torch.sigmoid(t * (r - 0.5)) - torch.sigmoid(-t / 2)) / (torch.sigmoid(t / 2) - torch.sigmoid(-t / 2))


SURROGATES = {
    "soft round": soft_surrogate,
    "dsq round": dsq_surrogate,
    "sign, approximate": approximate_surrogate,
    "sign, error decay": error_decay_surrogate,
}


@pytest.mark.parametrize("name", SURROGATES)
def test_the_second_derivatives_are_those_of_the_surrogate(name):
    rule = RULES[name]
    inputs = [leaf([-1.7, -0.6, -0.35, 0.2, 0.4, 0.9, 1.3]), *inputs_of(rule)[1:]]
    found, expected = (
        torch.autograd.grad(first, [*inputs[: rule.learned]], [cotangent(f) for f in first])
        for function in (rule.function, SURROGATES[name])
        for first in [
            torch.autograd.grad(function(*inputs), inputs[: rule.learned], cotangent(inputs[0]), create_graph=True)
        ]
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_soft_round_passes_torchs_own_gradient_checks():
    inputs = (leaf([-1.7, -0.6, 0.2, 0.45, 3.3]), leaf([[4.0], [0.5]]))
    assert torch.autograd.gradcheck(soft_round, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(soft_round, inputs)


@every_rule
def test_every_dtype_is_kept_in_the_output_and_in_every_gradient(rule):
    reference = gradients(rule, inputs_of(rule))
    for dtype, tolerance in ((torch.float16, 2e-2), (torch.bfloat16, 1e-1), (torch.float32, 1e-5)):
        exact = [value for value in X if value in (-2.5, -2.0, -0.75, -0.25, 0.0, 0.5, 1.25, 4.0, 7.25)]
        inputs = [leaf(exact, dtype), *inputs_of(rule, dtype)[1:]]
        wide = [leaf(exact), *inputs_of(rule)[1:]]
        for found, expected in zip(gradients(rule, inputs), gradients(rule, wide), strict=True):
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert all(value.dtype == torch.float64 for value in reference)


@every_rule
def test_meta_and_empty_tensors(rule):
    for x in (torch.empty(0, 3), torch.empty(2, 3, device="meta"), torch.empty(0, 3, device="meta")):
        inputs = [leaf(x, x.dtype), *(torch.tensor(value, device=x.device) for value in rule.parameters)]
        for value in inputs[1 : rule.learned]:
            value.requires_grad_()
        y = rule.function(*inputs)
        assert y.shape == x.shape and y.device == x.device
        found = torch.autograd.grad(y.sum(), inputs[: rule.learned])
        assert [value.shape for value in found] == [value.shape for value in inputs[: rule.learned]]
        if x.device.type == "cpu":
            assert all((value == 0).all() for value in found)


@every_rule
def test_inputs_and_their_layout_are_left_alone(rule):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).mul(2).to(memory_format=torch.channels_last)
    for laid_out in (x, x.transpose(1, 3), x[..., ::2]):
        inputs = [leaf(laid_out, torch.float32), *inputs_of(rule, torch.float32)[1:]]
        plain = [leaf(laid_out.contiguous(), torch.float32), *inputs_of(rule, torch.float32)[1:]]
        before = inputs[0].detach().clone()
        assert torch.equal(rule.function(*inputs), rule.function(*plain))
        assert torch.equal(inputs[0], before)
    assert rule.function(x.clone(memory_format=torch.preserve_format), *inputs[1:]).is_contiguous(
        memory_format=torch.channels_last
    )


@pytest.fixture
def compiler():
    """The compiler's own warnings differ between torch versions."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield partial(torch.compile, fullgraph=True, backend="aot_eager")


@every_rule
def test_compiled_without_a_break_it_gives_the_same(rule, compiler):
    compiled = compiler(rule.function)
    inputs = inputs_of(rule, torch.float32)
    for found, expected in zip(gradients(rule, inputs, compiled), gradients(rule, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@every_rule
def test_forward_mode_is_the_transpose_of_backward(rule):
    """For EWGS, whose backward looks at the sign of the gradient, forward mode is the straight-through one."""
    inputs = [value.detach() for value in inputs_of(rule)]
    learned, fixed = inputs[: rule.learned], inputs[rule.learned :]
    tangents = [torch.linspace(0.5, 2.0, value.numel(), dtype=value.dtype).reshape(value.shape) for value in learned]
    _, tangent = torch.func.jvp(lambda *learned: rule.function(*learned, *fixed), tuple(learned), tuple(tangents))
    if getattr(rule.function, "func", rule.function) in (ewgs_round, ewgs_gradient):
        assert torch.equal(tangent, tangents[0])
        return
    leaves = inputs_of(rule)
    y = rule.function(*leaves)
    for position in range(y.numel()):
        unit = torch.zeros(y.numel(), dtype=y.dtype)
        unit[position] = 1
        row = torch.autograd.grad(y, leaves[: rule.learned], unit.reshape(y.shape), retain_graph=True)
        expected = sum((gradient * given).sum() for gradient, given in zip(row, tangents, strict=True))
        torch.testing.assert_close(tangent.reshape(-1)[position], expected, rtol=1e-12, atol=1e-12)


@every_rule
@pytest.mark.parametrize("dims", ["x", "all", "parameters"])
def test_vmap_of_func_grad_equals_a_loop(rule, dims):
    if dims == "parameters" and not rule.parameters:
        dims = "x"
    inputs = [value.detach() for value in inputs_of(rule)]
    factors = torch.tensor([1.0, 0.9, 1.1], dtype=torch.float64)
    batched = [
        (value if slot == 0 else value * factors)
        if dims == "all" or (dims == "x") == (slot == 0)
        else (value[0] if slot == 0 else value)
        for slot, value in enumerate(inputs)
    ]
    in_dims = tuple(0 if dims == "all" or (dims == "x") == (slot == 0) else None for slot in range(len(inputs)))
    weights = torch.linspace(-2.0, 1.5, 6, dtype=torch.float64)

    def loss(*values: Tensor) -> Tensor:
        return (rule.function(*values) * weights).sum()

    slopes = torch.func.grad(loss, argnums=tuple(range(rule.learned)))
    found = torch.func.vmap(slopes, in_dims=in_dims)(*batched)
    for row in range(3):
        alone = slopes(*(value[row] if dim == 0 else value for value, dim in zip(batched, in_dims, strict=True)))
        for together, single in zip(found, alone, strict=True):
            torch.testing.assert_close(together[row], single, rtol=1e-12, atol=1e-12)


def test_vmap_of_the_forward_equals_the_whole():
    x = torch.tensor(X).reshape(3, 6)
    for rule in RULES.values():
        inputs = [x, *(torch.tensor(value) for value in rule.parameters)]
        in_dims = (0,) + (None,) * len(rule.parameters)
        assert torch.equal(torch.func.vmap(rule.function, in_dims=in_dims)(*inputs), rule.function(*inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [-1.75, -0.125, 0.25, 3.5, 7.0])
def test_stochastic_rounding_is_unbiased(value, dtype):
    n = 40_000
    y = stochastic_round_ste(torch.full((n,), value, dtype=dtype), torch.Generator().manual_seed(0))
    assert y.dtype == dtype
    assert set(y.tolist()) == {math.floor(value), math.ceil(value)}
    fraction = value - math.floor(value)
    five_deviations = 5 * math.sqrt(fraction * (1 - fraction) / n)
    assert abs(y.double().mean().item() - value) <= five_deviations


def test_stochastic_rounding_sees_fractions_finer_than_its_own_dtype():
    """1/4096 in float16: noise drawn in float16, on multiples of 1/2048, would give twice as many ones."""
    x = torch.full((1_000_000,), 1 / 4096, dtype=torch.float16)
    ones = stochastic_round_ste(x, torch.Generator().manual_seed(0)).float().sum().item()
    assert abs(ones - 1_000_000 / 4096) < 5 * math.sqrt(1_000_000 / 4096)


def test_stochastic_rounding_repeats_with_its_generator_and_leaves_the_global_one_alone():
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    first, second = (stochastic_round_ste(x, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(5)
    draws = [stochastic_round_ste(x, generator) for _ in range(2)]
    assert torch.equal(draws[0], first) and not torch.equal(draws[1], first)
    torch.manual_seed(5)
    assert torch.equal(stochastic_round_ste(x), first)


def test_stochastic_rounding_passes_the_gradient_and_handles_nan_and_infinities():
    x = leaf([nan, -inf, 0.3, inf, 2.0, -1e-30])
    y = stochastic_round_ste(x, torch.Generator().manual_seed(0))
    y.sum().backward()
    assert y[0].isnan() and y[1] == -inf and y[3] == inf and y[4] == 2 and y[5] == 0
    assert x.grad.tolist() == [1.0] * 6
    _, tangent = torch.func.jvp(stochastic_round_ste, (x.detach(),), (torch.full((6,), 3.0, dtype=torch.float64),))
    assert tangent.tolist() == [3.0] * 6
    assert stochastic_round_ste(torch.empty(0, 2)).shape == (0, 2)
    assert stochastic_round_ste(torch.empty(3, 2, device="meta")).device.type == "meta"


def test_stochastic_rounding_goes_up_where_the_noise_is_below_the_fraction():
    """Noise can be exactly 0: an integer stays where it is all the same."""
    x, noise = torch.tensor([2.0, 0.25, 0.25, -0.25]), torch.tensor([0.0, 0.2, 0.25, 0.7])
    assert apply(StochasticRoundSTEFunction, x, noise).tolist() == [2.0, 1.0, 0.0, 0.0]


def test_stochastic_rounding_compiles_and_maps(compiler):
    compiled = compiler(stochastic_round_ste)
    x = leaf(torch.full((20_000,), 0.25), torch.float32)
    torch.manual_seed(0)
    y = compiled(x)
    y.sum().backward()
    assert abs(y.mean().item() - 0.25) < 0.02 and set(y.tolist()) == {0.0, 1.0}
    assert x.grad.unique().tolist() == [1.0]
    rows = torch.full((2, 64), 0.5)
    mapped = {mode: torch.func.vmap(stochastic_round_ste, randomness=mode)(rows) for mode in ("same", "different")}
    assert torch.equal(mapped["same"][0], mapped["same"][1])
    assert not torch.equal(mapped["different"][0], mapped["different"][1])


ONE_X = [
    round_ste,
    floor_ste,
    ceil_ste,
    trunc_ste,
    stochastic_round_ste,
    sign_ste,
    ternary_sign_ste,
]
WITH_PARAMETERS = [
    (clamp_ste, (0.0, 1.0)),
    (error_decay_sign, (0.5,)),
    (ewgs_round, (0.1,)),
    (ewgs_gradient, (1.0, 0.1)),
    (soft_round, (1.0,)),
    (dsq_round, (0.5,)),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize(("function", "rest"), [(function, ()) for function in ONE_X] + WITH_PARAMETERS)
def test_only_floating_point_is_taken(function, rest, dtype):
    with pytest.raises(TypeError) as error:
        function(torch.ones(2, dtype=dtype), *rest)
    assert str(error.value) == f"{function.__name__}: x must be a floating-point tensor, got {dtype}"


HALF = torch.tensor([0.5])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: clamp_ste(HALF, 2, 1.5), "clamp_ste: low must be at most high, got low=2 and high=1.5"),
        (lambda: clamp_ste(HALF, nan, 1.0), "clamp_ste: low must be at most high, got low=nan and high=1.0"),
        (
            lambda: clamp_ste(HALF, 0.0, 1.0, gradient="clip"),
            "clamp_ste: unknown gradient 'clip'; known: clipped, straight_through",
        ),
        (
            lambda: sign_ste(HALF, gradient="tanh"),
            "sign_ste: unknown gradient 'tanh'; known: clipped, straight_through, approximate",
        ),
        (
            lambda: ternary_sign_ste(HALF, gradient="approximate"),
            "ternary_sign_ste: unknown gradient 'approximate'; known: clipped, straight_through",
        ),
        (lambda: ternary_sign_ste(HALF, -0.1), "ternary_sign_ste: threshold must be at least 0, got -0.1"),
        (lambda: error_decay_sign(HALF, 1.5), "error_decay_sign: progress must lie in 0..1, got 1.5"),
        (lambda: error_decay_sign(HALF, nan), "error_decay_sign: progress must lie in 0..1, got nan"),
        (lambda: ewgs_round(HALF, -0.1), "ewgs_round: delta must be at least 0, got -0.1"),
        (lambda: ewgs_gradient(HALF, 1.0, -0.1), "ewgs_gradient: delta must be at least 0, got -0.1"),
        (lambda: soft_round(HALF, 0), "soft_round: temperature must be positive and finite, got 0"),
        (lambda: soft_round(HALF, inf), "soft_round: temperature must be positive and finite, got inf"),
        (
            lambda: ewgs_round(HALF, torch.ones(2, 1)),
            "ewgs_round: delta must broadcast to x, got shapes (2, 1) and (1,)",
        ),
        (
            lambda: ewgs_gradient(HALF, torch.ones(2), 0.1),
            "ewgs_gradient: scale must broadcast to x, got shapes (2,) and (1,)",
        ),
        (
            lambda: error_decay_sign(HALF, torch.ones(1, 1)),
            "error_decay_sign: progress must broadcast to x, got shapes (1, 1) and (1,)",
        ),
        (
            lambda: ternary_sign_ste(torch.ones(3, 4), torch.ones(3)),
            "ternary_sign_ste: threshold must broadcast to x, got shapes (3,) and (3, 4)",
        ),
        (
            lambda: dsq_round(HALF, torch.ones(2)),
            "dsq_round: alpha must broadcast to x, got shapes (2,) and (1,)",
        ),
        (lambda: dsq_round(HALF, 1.0), "dsq_round: alpha must lie between 0 and 1, got 1.0"),
        (lambda: dsq_round(HALF, 0.0), "dsq_round: alpha must lie between 0 and 1, got 0.0"),
    ],
)
def test_mistakes_are_named_in_one_sentence(call, sentence):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == sentence


def test_a_parameter_without_a_gradient_gets_none():
    """Progress, threshold, delta and EWGS's scale are settings, even where they are leaves."""
    for name in ("sign, error decay", "ternary sign, clipped", "ewgs round", "ewgs gradient"):
        rule = RULES[name]
        x, *parameters = (leaf(value) for value in inputs_of(rule))
        y = rule.function(x, *parameters)
        found = torch.autograd.grad(y.sum(), parameters, allow_unused=True, retain_graph=True)
        assert found == (None,) * len(parameters)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert not grad.requires_grad or torch.autograd.grad(grad.sum(), parameters, allow_unused=True) == found


@pytest.mark.parametrize(("progress", "v"), [(0.37, -9.0), (0.5, -9.0), (0.5, 9.0), (1.0, -1.5), (1.0, 0.3)])
@pytest.mark.parametrize(
    "estimator",
    [error_decay_sign, lambda x, progress: binary_quantize(x, None, "error_decay", progress)],
    ids=["error_decay_sign", "binary_quantize"],
)
def test_the_error_decay_keeps_its_digits_in_the_tails_of_float32(estimator, progress, v):
    """1 - tanh(z)^2 as a difference has none left: half a digit at z = 9, then 0."""
    x = torch.tensor([v], requires_grad=True)
    estimator(x, torch.tensor(progress)).sum().backward()
    t = 0.1 * 10 ** (2 * progress)
    expected = max(1 / t, 1) * t / math.cosh(t * v) ** 2
    assert x.grad.item() == pytest.approx(expected, rel=2e-5)
