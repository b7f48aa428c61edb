"""Rules with a range of their own: PACT, DoReFa, APoT, power-of-two scales, learned bit-widths.

Edges and levels by hand, forward against NumPy float64, every derivative against the surrogate that the rule claims.
"""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from qat.functional.codebooks.apot import apot_levels, apot_quantize, normalize_weight
from qat.functional.dorefa import dorefa_quantize_activation, dorefa_quantize_weight
from qat.functional.learned_bits import bit_cost, learned_bits_quantize
from qat.functional.pact import pact_quantize
from qat.functional.power_of_two import power_of_two_scale

INF, NAN = math.inf, math.nan
Array = npt.NDArray[np.float64]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def leaf(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).clone().requires_grad_()


def uneven(x: Tensor) -> Tensor:
    """An uneven gradient of the output, so that sums over wrong axes show."""
    return torch.linspace(0.5, 2.0, x.numel(), dtype=x.dtype).reshape(x.shape)


# ---------------------------------------------------------------- errors

ERRORS = {
    "pact bits": (
        lambda: pact_quantize(torch.zeros(2), torch.tensor(1.0), 17),
        ValueError,
        "pact_quantize: bits must be a whole number from 1 to 16, got 17",
    ),
    "pact bits, fraction": (
        lambda: pact_quantize(torch.zeros(2), torch.tensor(1.0), 2.5),
        ValueError,
        "pact_quantize: bits must be a whole number from 1 to 16, got 2.5",
    ),
    "pact integer x": (
        lambda: pact_quantize(torch.zeros(2, dtype=torch.int32), torch.tensor(1.0), 4),
        TypeError,
        "pact_quantize: x must be a floating-point tensor, got torch.int32",
    ),
    "dorefa weight bits": (
        lambda: dorefa_quantize_weight(torch.zeros(2), 0),
        ValueError,
        "dorefa_quantize_weight: bits must be a whole number from 1 to 16, got 0",
    ),
    "dorefa weight bits, bool": (
        lambda: dorefa_quantize_weight(torch.zeros(2), True),
        ValueError,
        "dorefa_quantize_weight: bits must be a whole number from 1 to 16, got True",
    ),
    "dorefa weight axis": (
        lambda: dorefa_quantize_weight(torch.zeros(2, 3), 4, channel_axis=(0, 2)),
        ValueError,
        "dorefa_quantize_weight: channel_axis must be in -2..1 for a weight of shape (2, 3), got 2",
    ),
    "dorefa activation bits": (
        lambda: dorefa_quantize_activation(torch.zeros(2), -1),
        ValueError,
        "dorefa_quantize_activation: bits must be a whole number from 1 to 16, got -1",
    ),
    "dorefa activation, bool x": (
        lambda: dorefa_quantize_activation(torch.zeros(2, dtype=torch.bool), 4),
        TypeError,
        "dorefa_quantize_activation: x must be a floating-point tensor, got torch.bool",
    ),
    "apot, no bit left for the magnitude": (
        lambda: apot_quantize(torch.zeros(2), torch.tensor(1.0), 1),
        ValueError,
        "apot_quantize: bits must be a whole number from 2 to 9, got 1",
    ),
    "apot unsigned": (
        lambda: apot_quantize(torch.zeros(2), torch.tensor(1.0), 9, signed=False),
        ValueError,
        "apot_quantize: bits must be a whole number from 1 to 8, got 9",
    ),
    "apot complex x": (
        lambda: apot_quantize(torch.zeros(2, dtype=torch.complex64), torch.tensor(1.0), 4),
        TypeError,
        "apot_quantize: x must be a floating-point tensor, got torch.complex64",
    ),
    "apot levels": (
        lambda: apot_levels(9),
        ValueError,
        "apot_levels: bits must be a whole number from 1 to 8, got 9",
    ),
    "normalize axis": (
        lambda: normalize_weight(torch.zeros(2, 3), channel_axis=-3),
        ValueError,
        "normalize_weight: channel_axis must be in -2..1 for a weight of shape (2, 3), got -3",
    ),
    "power of two rounding": (
        lambda: power_of_two_scale(torch.tensor(1.0), "down"),
        ValueError,
        "power_of_two_scale: unknown rounding 'down'; known: nearest, up",
    ),
    "learned bits integer x": (
        lambda: learned_bits_quantize(torch.zeros(2, dtype=torch.int64), torch.tensor(1.0), torch.tensor(4.0)),
        TypeError,
        "learned_bits_quantize: x must be a floating-point tensor, got torch.int64",
    ),
}


@pytest.mark.parametrize(("call", "kind", "sentence"), ERRORS.values(), ids=ERRORS.keys())
def test_mistakes_get_one_sentence(call, kind, sentence):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == sentence


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("x", "y", "grad_x", "grad_alpha"),
    [
        (-0.01, 0.0, 0.0, 0.0),
        (0.0, 0.0, 1.0, 0.0),  # on the lower bound: inside
        (1.0, 0.0, 1.0, 0.0),  # v = 1/2: a tie goes to the even neighbour
        (3.0, 4.0, 1.0, 0.0),  # v = 3/2
        (5.0, 4.0, 1.0, 0.0),  # v = 5/2
        (5.99, 6.0, 1.0, 0.0),
        (6.0, 6.0, 1.0, 1.0),  # on alpha: inside for x, and alpha learns
        (6.01, 6.0, 0.0, 1.0),
        (INF, 6.0, 0.0, 1.0),
        (-INF, 0.0, 0.0, 0.0),
    ],
)
def test_pact_at_the_edges(x, y, grad_x, grad_alpha):
    value, alpha = leaf([x]), leaf(6.0)
    out = pact_quantize(value, alpha, 2)
    out.sum().backward()
    assert (out.item(), value.grad.item(), alpha.grad.item()) == (y, grad_x, grad_alpha)


@pytest.mark.parametrize("alpha", [0.1, 0.7, 5.3])
@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_pact_alpha_counts_as_inside_whatever_the_step_rounds_to(alpha, bits):
    """In float32 alpha / (alpha / n) may come out on either side of n."""
    value, bound = leaf([alpha], torch.float32), leaf(alpha, torch.float32)
    pact_quantize(value, bound, bits).sum().backward()
    assert (value.grad.item(), bound.grad.item()) == (1.0, 1.0)


def test_pact_is_the_integer_grid_that_gets_exported():
    """The integers that ONNX makes of x with the scale alpha / n, and the values that it makes of them."""
    x, alpha = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 5, torch.tensor(4.1)
    scale = alpha / 255
    codes = torch.clamp(torch.round(x / scale), 0, 255)
    assert torch.equal(pact_quantize(x, alpha, 8), codes * scale)


def test_dorefa_activation_at_the_edges():
    x = leaf([-INF, -0.01, 0.0, 0.5, 5 / 6, 1.0, 1.01, INF])
    y = dorefa_quantize_activation(x, 2)
    y.sum().backward()
    assert y.tolist() == [0.0, 0.0, 0.0, 2 / 3, 2 / 3, 1.0, 1.0, 1.0]  # 0.5 * 3 and 5/6 * 3 are ties
    assert x.grad.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_dorefa_weight_by_hand():
    weight = leaf(np.arctanh([0.8, -0.2, 0.0, 0.28]))
    y = dorefa_quantize_weight(weight, 2)
    # tanh(w) / (2 * 0.8) + 1/2 = 1, 0.375, 0.5, 0.675; times 3: 3, 1.125, 1.5, 2.025
    np.testing.assert_allclose(y.detach(), [1.0, -1 / 3, 1 / 3, 1 / 3], rtol=0, atol=1e-15)
    y.backward(double(1.0, 2.0, 3.0, 4.0))
    # u = tanh(w) / 0.8; the largest one gets its own 1 / 0.8, and -sum(grad * u) / 0.8 through the maximum
    through_largest = -(1.0 * 1.0 + 2.0 * -0.25 + 4.0 * 0.35) / 0.8
    expected = [(1.25 + through_largest) * 0.36, 2.5 * 0.96, 3.75, 5.0 * (1 - 0.28**2)]
    np.testing.assert_allclose(weight.grad, expected, rtol=1e-12)


def test_dorefa_ties_share_the_gradient_of_the_maximum():
    weight = leaf([1.0, -1.0, 0.5])
    dorefa_quantize_weight(weight, 4).backward(double(0.0, 0.0, 1.0))
    top, half = math.tanh(1.0), math.tanh(0.5)
    each = -half / top**2 / 2 * (1 - top**2)
    np.testing.assert_allclose(weight.grad, [each, -each, (1 - half**2) / top], rtol=1e-12)


def test_dorefa_one_bit_is_sign_times_mean_magnitude():
    weight = leaf([[0.5, -1.5], [0.0, -0.0], [-3.0, 1.0]])
    assert dorefa_quantize_weight(weight, 1).tolist() == [[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]
    y = dorefa_quantize_weight(weight, 1, channel_axis=0)
    assert y.tolist() == [[1.0, -1.0], [0.0, 0.0], [-2.0, 2.0]]
    y.backward(uneven(weight))
    assert torch.equal(weight.grad, uneven(weight))


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("smallest", [0.0, 1e-310])
def test_dorefa_of_nothing_is_finite(bits, smallest):
    """An all-zero tensor has no maximum to divide by; nor has one of subnormal numbers."""
    weight = leaf([[smallest, smallest], [0.5, -0.25]])
    y = dorefa_quantize_weight(weight, bits, channel_axis=0)
    y.sum().backward()
    assert y.isfinite().all() and weight.grad.isfinite().all()
    if bits > 1:
        assert y[0].tolist() == pytest.approx([1 / (2**bits - 1)] * 2)  # the tie at u = 1/2 goes to the even code
        assert weight.grad[0].tolist() == [1.0, 1.0]


def test_dorefa_per_channel_is_each_channel_by_itself():
    weight = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bits in (1, 3):
        rows = torch.stack([dorefa_quantize_weight(row, bits) for row in weight])
        assert torch.equal(dorefa_quantize_weight(weight, bits, channel_axis=0), rows)
        pairs = torch.stack([torch.stack([dorefa_quantize_weight(v, bits) for v in row.T]) for row in weight])
        assert torch.equal(dorefa_quantize_weight(weight, bits, channel_axis=(0, -1)), pairs.transpose(1, 2))
        # every element a channel: it is its own maximum, so the levels are the ends
        alone = dorefa_quantize_weight(weight, bits, channel_axis=(0, 1, 2))
        assert torch.equal(alone, weight if bits == 1 else torch.sign(weight))


# ---------------------------------------------------------------- APoT's levels


def test_apot_levels_are_the_published_ones():
    """RECIPES.md: {0, 1/2, 1/4, 1/8}; {0, 1/2, 1/4, 1/16} + {0, 1/8}; the two terms of 4 bits; by their maximum."""
    assert apot_levels(1) == (0.0, 1.0)
    assert apot_levels(2) == (0.0, 1 / 4, 1 / 2, 1.0)
    assert apot_levels(3) == (0.0, 1 / 10, 2 / 10, 3 / 10, 4 / 10, 6 / 10, 8 / 10, 1.0)
    terms = [0, 2**-1, 2**-3, 2**-5], [0, 2**-2, 2**-4, 2**-6]
    four = sorted((a + b) / 0.75 for a in terms[0] for b in terms[1])
    assert apot_levels(4) == tuple(four)


def test_apot_levels_of_five_bits_follow_the_pattern():
    """Exponents 1 .. 4 in turn to two terms, 5 to the one-bit term, 6 and 7 in turn again."""
    terms = [0, 2**-1, 2**-3, 2**-6], [0, 2**-2, 2**-4, 2**-7], [0, 2**-5]
    sums = sorted(a + b + c for a in terms[0] for b in terms[1] for c in terms[2])
    assert apot_levels(5) == tuple(value / sums[-1] for value in sums)


@pytest.mark.parametrize("magnitude_bits", range(1, 9))
def test_apot_reaches_exactly_its_levels(magnitude_bits):
    levels = apot_levels(magnitude_bits)
    assert len(set(levels)) == 2**magnitude_bits and list(levels) == sorted(levels)
    x = torch.cat([double(*levels), torch.linspace(-1.2, 1.2, 20001, dtype=torch.float64)]) * 2
    unsigned = apot_quantize(x, scalar(2.0), magnitude_bits, signed=False)
    assert sorted(set((unsigned / 2).tolist())) == list(levels)
    signed = apot_quantize(x, scalar(2.0), magnitude_bits + 1)
    assert sorted(set((signed / 2).tolist())) == sorted({-level for level in levels} | set(levels))
    assert torch.equal(apot_quantize(signed, scalar(2.0), magnitude_bits + 1), signed)  # idempotent


@pytest.mark.parametrize(
    ("x", "y", "grad_x", "grad_alpha"),
    [
        (0.25, 0.0, 1.0, -0.125),  # x / alpha = 1/8 is a tie of 0 and 1/4: the smaller magnitude
        (-0.25, 0.0, 1.0, 0.125),
        (0.75, 0.5, 1.0, -0.125),  # 3/8: a tie of 1/4 and 1/2
        (-0.75, -0.5, 1.0, 0.125),
        (1.5, 1.0, 1.0, -0.25),  # 3/4: a tie of 1/2 and 1
        (1.6, 2.0, 1.0, 0.2),
        (2.0, 2.0, 1.0, 0.0),  # on the bound: inside
        (-2.0, -2.0, 1.0, 0.0),
        (2.5, 2.0, 0.0, 1.0),
        (-2.5, -2.0, 0.0, -1.0),
        (INF, 2.0, 0.0, 1.0),
        (-INF, -2.0, 0.0, -1.0),
        (0.0, 0.0, 1.0, 0.0),
    ],
)
def test_apot_at_the_edges(x, y, grad_x, grad_alpha):
    value, alpha = leaf([x]), leaf(2.0)
    out = apot_quantize(value, alpha, 3)
    out.sum().backward()
    assert (out.item(), value.grad.item()) == (y, grad_x)
    assert alpha.grad.item() == pytest.approx(grad_alpha, abs=1e-15)


def test_unsigned_apot_clips_at_zero():
    x, alpha = leaf([-INF, -0.5, 0.0, 0.5, 3.0]), leaf(2.0)
    y = apot_quantize(x, alpha, 2, signed=False)
    y.backward(double(1.0, 10.0, 100.0, 1000.0, 10000.0))
    assert y.tolist() == [0.0, 0.0, 0.0, 0.5, 2.0]
    assert x.grad.tolist() == [0.0, 0.0, 100.0, 1000.0, 0.0]
    assert alpha.grad.item() == 10000.0


def test_apot_keeps_the_layout_of_x():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert apot_quantize(x, torch.tensor(1.0), 4).is_contiguous(memory_format=torch.channels_last)


def test_normalize_weight_by_hand():
    weight = leaf([[1.0, 3.0], [7.0, 7.0]])
    y = normalize_weight(weight, channel_axis=0)
    assert y.tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    y.backward(double(1.0, 2.0, 3.0, 4.0).reshape(2, 2))
    np.testing.assert_allclose(weight.grad, [[1.0, 2.0], [3e5, 4e5]], rtol=1e-12)  # statistics are constants
    whole = normalize_weight(weight.detach())
    np.testing.assert_allclose(whole, (weight.detach() - 4.5) / np.std(weight.detach().numpy()), rtol=1e-12)
    assert normalize_weight(weight.detach(), channel_axis=(0, 1)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert normalize_weight(torch.tensor(3.0)).item() == 0.0


# ---------------------------------------------------------------- powers of two


def test_powers_of_two_by_hand():
    scale = leaf([0.25, 0.3, 0.36, 1.0, 1.4, 1.5, 3.0, 1e-12, 1e12])
    y = power_of_two_scale(scale)
    y.sum().backward()
    assert y.tolist() == [0.25, 0.25, 0.5, 1.0, 1.0, 2.0, 4.0, 2.0**-40, 2.0**40]
    assert scale.grad.tolist() == [p / s for p, s in zip(y.tolist(), scale.tolist(), strict=True)]
    up = power_of_two_scale(scale, "up")
    assert up.tolist() == [0.25, 0.5, 0.5, 1.0, 2.0, 2.0, 4.0, 2.0**-39, 2.0**40]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_powers_of_two_stay_and_up_covers_the_next_number(dtype):
    """log2 alone cannot tell 2^20 from the number after it."""
    limits = torch.finfo(dtype)
    exponents = range(math.frexp(limits.tiny)[1] - 1, math.frexp(limits.max)[1] - 1)
    powers = torch.tensor([2.0**e for e in exponents], dtype=torch.float64).to(dtype)
    above = torch.nextafter(powers, torch.full_like(powers, INF))
    below = torch.nextafter(powers, torch.zeros_like(powers))
    for x in (powers, above, below):
        assert torch.equal(power_of_two_scale(x), powers)
    assert torch.equal(power_of_two_scale(powers, "up"), powers)
    assert torch.equal(power_of_two_scale(below, "up"), powers)
    assert torch.equal(power_of_two_scale(above, "up"), powers * 2)


@pytest.mark.parametrize("rounding", ["nearest", "up"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_powers_of_two_do_not_overflow(dtype, rounding):
    largest = torch.finfo(dtype).max
    scale = leaf([largest, INF], dtype)
    y = power_of_two_scale(scale, rounding)
    y.sum().backward()
    highest = 2.0 ** (math.frexp(largest)[1] - 1)
    assert y.tolist() == [highest] * 2
    assert scale.grad.tolist() == torch.tensor([highest / largest, 0.0], dtype=dtype).tolist()


# ---------------------------------------------------------------- learned bits


@pytest.mark.parametrize(
    ("x", "y", "grad_x", "slope", "edge"),
    [
        (0.5, 0.0, 1.0, -0.5, 0.0),  # reach 3, 3 bits: the step is 1; a tie goes to the even neighbour
        (1.5, 2.0, 1.0, 0.5, 0.0),
        (-2.5, -2.0, 1.0, 0.5, 0.0),
        (2.75, 3.0, 1.0, 0.25, 0.0),
        (3.0, 3.0, 1.0, 0.0, 0.0),  # on the bound: inside
        (-3.0, -3.0, 1.0, 0.0, 0.0),
        (3.25, 3.0, 0.0, 0.0, 1.0),
        (-INF, -3.0, 0.0, 0.0, -1.0),
        (INF, 3.0, 0.0, 0.0, 1.0),
    ],
)
def test_learned_bits_at_the_edges(x, y, grad_x, slope, edge):
    value, reach, bits = leaf([x]), leaf(3.0), leaf(3.2)
    out = learned_bits_quantize(value, reach, bits, grad_factor=0.5)
    out.sum().backward()
    assert (out.item(), value.grad.item()) == (y, grad_x)
    assert reach.grad.item() == pytest.approx(0.5 * (slope / 3 + edge), abs=1e-15)
    # dscale/dn = -reach / qmax^2 * ln 2 * 2^(n-1) with n = 3
    assert bits.grad.item() == pytest.approx(0.5 * slope * (-3.0 / 9.0 * math.log(2) * 4.0), abs=1e-15)


def test_unsigned_learned_bits_start_at_zero():
    x, reach, bits = leaf([-INF, -0.5, 0.0, 0.75, 9.0]), leaf(3.0), leaf(1.5)  # a tie: two bits
    y = learned_bits_quantize(x, reach, bits, signed=False)
    y.backward(double(1.0, 10.0, 100.0, 1000.0, 10000.0))
    assert y.tolist() == [0.0, 0.0, 0.0, 1.0, 3.0]
    assert x.grad.tolist() == [0.0, 0.0, 100.0, 1000.0, 0.0]
    assert reach.grad.item() == pytest.approx(1000 * 0.25 / 3 + 10000)
    assert bits.grad.item() == pytest.approx(1000 * 0.25 * -(3 / 9 * math.log(2) * 4))


@pytest.mark.parametrize(
    ("bits", "signed", "levels"), [(1.0, True, 3), (-7.0, True, 3), (-7.0, False, 2), (2.5, True, 3), (3.5, True, 15)]
)
def test_learned_bits_out_of_range_act_as_the_nearest_width(bits, signed, levels):
    x = torch.linspace(-2, 2, 1001)
    y = learned_bits_quantize(x, torch.tensor(1.0), torch.tensor(bits), signed)
    assert len(y.unique()) == levels
    widest = learned_bits_quantize(x, torch.tensor(1.0), torch.tensor(99.0), signed)
    assert torch.equal(widest, learned_bits_quantize(x, torch.tensor(1.0), torch.tensor(16.0), signed))


@pytest.mark.parametrize("reach", [0.1, 0.7, 5.3])
@pytest.mark.parametrize("bits", [2.0, 7.0, 8.0, 16.0])
def test_reach_counts_as_inside_whatever_the_step_rounds_to(reach, bits):
    x = leaf([reach, -reach], torch.float32)
    learned_bits_quantize(x, torch.tensor(reach), torch.tensor(bits)).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_bits_may_differ_by_channel():
    x = torch.linspace(-2, 2, 2002, dtype=torch.float64).reshape(2, 1001)
    bits, reach = leaf([[2.0], [4.0]]), leaf(1.5)
    y = learned_bits_quantize(x, reach, bits)
    y.backward(uneven(y))
    for row, width in enumerate((2.0, 4.0)):
        single = leaf(width)
        expected = learned_bits_quantize(x[row], scalar(1.5), single)
        expected.backward(uneven(y)[row])
        assert torch.equal(y[row], expected)
        assert bits.grad[row].item() == pytest.approx(single.grad.item())


def test_bit_cost_counts_whole_bits():
    bits = leaf([2.5, 3.5, 4.2])
    cost = bit_cost(bits, 100)
    cost.sum().backward()
    assert cost.tolist() == [200.0, 400.0, 400.0]
    assert bits.grad.tolist() == [100.0, 100.0, 100.0]
