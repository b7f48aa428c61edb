"""What the matrix of test_estimators.py cannot say of PACT, DoReFa, APoT, power-of-two scales and learned bit widths:
float32 at the bound, statistics of nothing, other channel axes, the ends of every dtype.
"""

import math

import pytest
import torch

from qat.functional.codebooks.apot import normalize_weight
from qat.functional.dorefa import dorefa_quantize_weight
from qat.functional.learned_bits import bit_cost, learned_bits_quantize
from qat.functional.pact import pact_quantize
from qat.functional.power_of_two import power_of_two_scale
from tests.references.leaves import cotangent, leaf, same

INF = math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("bound", [0.1, 0.7, 5.3])
@pytest.mark.parametrize("bits", [2, 4, 7, 8, 16])
def test_a_value_on_the_bound_is_inside_whatever_the_step_rounds_to(bound, bits):
    """In float32 alpha / (alpha / n) may come out on either side of n."""
    x, alpha = leaf([bound], torch.float32), leaf(bound, torch.float32)
    pact_quantize(x, alpha, bits).sum().backward()
    assert (x.grad.item(), alpha.grad.item()) == (1.0, 1.0)
    x = leaf([bound, -bound], torch.float32)
    learned_bits_quantize(x, torch.tensor(bound), torch.tensor(float(bits))).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_pact_is_the_integer_grid_that_gets_exported():
    """The integers that ONNX makes of x with the scale alpha / n, and the values that it makes of them."""
    x, alpha = torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 5, torch.tensor(4.1)
    scale = alpha / 255
    codes = torch.clamp(torch.round(x / scale), 0, 255)
    assert torch.equal(pact_quantize(x, alpha, 8), codes * scale)


# DoReFa, APoT


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


# Powers of two


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


# Learned bit widths


@pytest.mark.parametrize(
    ("bits", "signed", "levels"), [(1.0, True, 3), (-7.0, True, 3), (-7.0, False, 2), (2.5, True, 3), (3.5, True, 15)]
)
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
