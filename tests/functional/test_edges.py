"""What the matrix of test_estimators.py cannot say of single estimators: other channel axes, statistics of nothing,
values that are not finite, float32 at the bound, the ends of every dtype, the scales themselves.
"""

import math

import pytest
import torch

from qat.functional.codebooks.apot import normalize_weight
from qat.functional.codebooks.binary import binary_quantize, binary_scale
from qat.functional.codebooks.floats import FLOAT_FORMATS, cast, leading_power, mx_quantize, mx_scale
from qat.functional.codebooks.n2uq import n2uq_quantize
from qat.functional.codebooks.ternary import ternary_quantize, ternary_scale, ttq_quantize
from qat.functional.dorefa import dorefa_quantize_weight
from qat.functional.learned_bits import bit_cost, learned_bits_quantize
from qat.functional.pact import pact_quantize
from qat.functional.power_of_two import power_of_two_scale
from tests.references.leaves import cotangent, leaf, same, slopes

INF, NAN = math.inf, math.nan
ONE = torch.tensor(1.0)
TINY = torch.finfo(torch.float32).tiny


def test_binary_weights_take_their_scale_from_any_axes():
    weight = torch.tensor([[1.0, -3.0], [0.0, -0.0], [-0.5, -1.5]])
    same(binary_quantize(weight, 1), [[0.5, -1.5], [0.5, 1.5], [-0.5, -1.5]])
    same(binary_quantize(weight, (0, 1)), [[1.0, -3.0], [0.0, 0.0], [-0.5, -1.5]])
    same(binary_quantize(weight, (-2,)), binary_quantize(weight))
    same(binary_quantize(torch.tensor(-3.0), None), -3.0)


def test_binary_scale_is_positive_and_wide():
    weight = torch.tensor([[1.0, -3.0], [0.0, -0.0]], dtype=torch.float16)
    same(binary_scale(weight), [[2.0], [TINY]])
    assert binary_scale(weight).dtype == torch.float32
    assert binary_scale(weight.double(), None).shape == (1, 1)
    same(binary_scale(weight, (0, 1)), [[1.0, 3.0], [TINY] * 2])
    assert (binary_scale(torch.zeros(3, 0)) > 0).all()


@pytest.mark.parametrize(("gradient", "progress", "expected"), [
    ("clipped", None, [0, 0, 0]),
    ("straight_through", None, [1, 1, 1]),
    ("approximate", None, [0, 0, 0]),
    ("error_decay", 0.5, [0, 0, NAN]),
])  # fmt: skip
def test_binary_gradients_of_values_that_are_not_finite(gradient, progress, expected):
    weight = leaf([INF, -INF, NAN])
    (got,) = slopes(binary_quantize(weight, None, gradient, progress), weight)
    same(torch.tensor(got), expected)


def test_ternary_threshold_is_exclusive():
    """Mean 2.5, threshold 1.75: 1.75 itself becomes 0; kept are 4 and 3.5."""
    weight = torch.tensor([[4.0, -3.5, 1.75, 0.75], [0.0, -0.0, 0.0, 0.0], [-2.0, -2.0, 2.0, 2.0]], dtype=torch.float64)
    scale, threshold = ternary_scale(weight)
    same(scale, [[3.75], [torch.finfo(torch.float64).tiny], [2.0]])
    same(threshold, [[1.75], [0.0], [1.4]])
    same(ternary_quantize(weight), [[3.75, -3.75, 0.0, 0.0], [0.0] * 4, [-2.0, -2.0, 2.0, 2.0]])
    same(ternary_quantize(weight, (0, 1)), weight)
    assert ternary_scale(weight, None)[0].shape == (1, 1)
    assert ternary_scale(weight.half())[1].dtype == torch.float32


def test_ternary_keeps_what_is_infinite():
    weight = leaf([[INF, 1.0, -INF, 0.0], [1.0, -1.0, 0.1, 0.0]])
    y = ternary_quantize(weight)
    same(y, [[INF, 0.0, -INF, 0.0], [1.0, -1.0, 0.0, 0.0]])
    assert slopes(y, weight) == [[[1.0] * 4] * 2]


def test_ttq_at_the_edges():
    positive, negative, zeros = leaf(3.0), leaf(5.0), leaf([0.0, 0.0])
    assert slopes(ttq_quantize(zeros, positive, negative), zeros, positive) == [[1.0, 1.0], 0.0]
    weight = leaf([INF, 1.0, -INF])
    y = ttq_quantize(weight, positive, negative, 0.0)
    same(y, [3.0, 3.0, -5.0])
    assert slopes(y, weight, positive) == [[3.0, 3.0, 5.0], 2.0]
    same(ttq_quantize(weight, positive, negative), [3.0, 0.0, -5.0])
    same(ttq_quantize(leaf([NAN, 1.0]), positive, negative), [NAN, NAN])


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8, 15, 255])
def test_n2uq_with_equal_widths_is_the_uniform_quantizer(number):
    """Away from ties, for every number of steps that the bisection may meet."""
    x = torch.linspace(-2.0, number + 2.0, 997, dtype=torch.float64) + 1e-4
    y = n2uq_quantize(x, x.new_zeros(1), x.new_ones(number), x.new_ones(()))
    same(y, x.round().clamp(0, number))


def test_negative_zero_keeps_its_sign_in_a_cast():
    assert all(cast(torch.tensor(-0.0), name).signbit() for name in FLOAT_FORMATS)


def test_leading_power_is_exact_next_to_every_power():
    for dtype, lowest, highest in ((torch.float32, -127, 127), (torch.float64, -127, 135), (torch.float32, 0, 2)):
        powers = torch.tensor([2.0**k for k in range(lowest, highest + 1)], dtype=dtype)
        same(leading_power(powers, lowest, highest), powers)
        same(leading_power(powers.nextafter(INF * ONE), lowest, highest), powers)
        same(leading_power(powers[1:].nextafter(-ONE), lowest, highest), powers[:-1])
        same(leading_power(torch.tensor([0.0, INF], dtype=dtype), lowest, highest), powers[[0, -1]])


def test_mx_scales_are_the_powers_of_the_standard():
    blocks = torch.tensor([[1.0, -7.9], [8.0, 0.0], [3e-45, 0.0], [0.0, 0.0], [-3.4e38, 1.0]])
    same(mx_scale(blocks, "e4m3"), [[2.0**-6], [2.0**-5], [2.0**-127], [1.0], [2.0**119]])
    same(mx_scale(blocks, "e2m1"), [[1.0], [2.0], [2.0**-127], [1.0], [2.0**125]])
    same(mx_scale(blocks, "int8"), [[4.0], [8.0], [2.0**-127], [1.0], [2.0**127]])
    same(mx_scale(torch.tensor([[1e300]], dtype=torch.float64), "e5m2"), [[2.0**127]])
    assert mx_scale(blocks.half(), "e4m3").dtype == torch.float32


def test_mx_takes_short_axes_scalars_and_nothing():
    x = torch.tensor([[8.0, 0.01, 0.01, 8.0, 0.02, 0.02]])
    assert torch.equal(mx_quantize(x, "e4m3"), mx_quantize(x, "e4m3", block_size=6))
    same(mx_quantize(torch.tensor(5.1), "e2m1"), 6.0)
    assert mx_quantize(torch.zeros(3, 0), "e4m3").shape == (3, 0)
    assert mx_quantize(torch.zeros(0, 64), "e4m3").shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*FLOAT_FORMATS, "int8"])
def test_mx_is_finite_beside_infinity_and_loses_a_block_to_nan(name, dtype):
    x = leaf([[INF, 1.0, -INF, 0.0], [1.0, NAN, 0.0, 2.0], [0.0, -0.0, 0.0, 0.0], [1.0, 1.0, -1.0, 0.0]], dtype)
    y = mx_quantize(x, name)
    assert y[0].isfinite().all() and y[0, 0] == -y[0, 2] and y[0, 0] > torch.finfo(torch.float16).max / 2
    assert y[1].isnan().all()
    same(y[2:].detach(), [[0.0] * 4, [1.0, 1.0, -1.0, 0.0]])
    assert slopes(y, x)[0] == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("bound", [0.1, 0.7, 5.3])
@pytest.mark.parametrize("bits", [2, 4, 7, 8, 16])
def test_a_value_on_the_bound_is_inside(bound, bits):
    """In float32 alpha / (alpha / n) may come out on either side of n."""
    x, alpha = leaf([bound], torch.float32), leaf(bound, torch.float32)
    pact_quantize(x, alpha, bits).sum().backward()
    assert (x.grad.item(), alpha.grad.item()) == (1.0, 1.0)
    x = leaf([bound, -bound], torch.float32)
    learned_bits_quantize(x, torch.tensor(bound), torch.tensor(float(bits))).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


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
    assert dorefa_quantize_weight(torch.zeros(2, 20), bits).isfinite().all()


def test_dorefa_and_normalization_take_several_channel_axes():
    weight = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for bits in (1, 3):
        pairs = torch.stack([torch.stack([dorefa_quantize_weight(v, bits) for v in row.T]) for row in weight])
        same(dorefa_quantize_weight(weight, bits, channel_axis=(0, -1)), pairs.transpose(1, 2))
        # every element a channel: it is its own maximum, so the levels are the ends
        alone = dorefa_quantize_weight(weight, bits, channel_axis=(0, 1, 2))
        same(alone, weight if bits == 1 else torch.sign(weight))
    assert not normalize_weight(weight, channel_axis=(0, 1, 2)).any()
    assert normalize_weight(torch.tensor(3.0)).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_do_not_overflow(dtype, rounding):
    largest = torch.finfo(dtype).max
    scale = leaf([largest, INF], dtype)
    y = power_of_two_scale(scale, rounding)
    y.sum().backward()
    highest = 2.0 ** (math.frexp(largest)[1] - 1)
    assert y.tolist() == [highest] * 2
    assert scale.grad.tolist() == torch.tensor([highest / largest, 0.0], dtype=dtype).tolist()


@pytest.mark.parametrize(("bits", "signed", "levels"), [
    (1.0, True, 3),
    (-7.0, True, 3),
    (-7.0, False, 2),
    (2.5, True, 3),
    (3.5, True, 15),
])  # fmt: skip
def test_learned_bits_out_of_range_act_as_the_nearest_width(bits, signed, levels):
    x = torch.linspace(-2, 2, 1001)
    y = learned_bits_quantize(x, torch.tensor(1.0), torch.tensor(bits), signed)
    assert len(y.unique()) == levels
    widest = learned_bits_quantize(x, torch.tensor(1.0), torch.tensor(99.0), signed)
    assert torch.equal(widest, learned_bits_quantize(x, torch.tensor(1.0), torch.tensor(16.0), signed))


def test_bits_may_differ_by_channel():
    x = torch.linspace(-2, 2, 2002, dtype=torch.float64).reshape(2, 1001)
    bits, reach = leaf([[2.0], [4.0]]), leaf(1.5)
    y = learned_bits_quantize(x, reach, bits)
    y.backward(cotangent(y))
    for row, width in enumerate((2.0, 4.0)):
        single = leaf(width)
        expected = learned_bits_quantize(x[row], reach.detach(), single)
        expected.backward(cotangent(y)[row])
        assert torch.equal(y[row], expected)
        assert bits.grad[row].item() == pytest.approx(single.grad.item())


def test_bit_cost_counts_whole_bits_and_learns_their_number():
    bits = leaf([2.0, 2.5, 3.5, 4.5, 7.9])
    cost = bit_cost(bits, 100)
    assert cost.tolist() == [200, 200, 400, 400, 800]
    assert torch.autograd.grad(cost.sum(), bits)[0].tolist() == [100.0] * 5
