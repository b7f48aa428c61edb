"""Binary, ternary, N2UQ, low-precision floats, MX blocks: error sentences, edges computed by hand, casts of torch."""

import math
import re
from functools import partial

import pytest
import torch
from torch import Tensor

from qat.functional.codebooks.binary import binary_quantize, binary_scale
from qat.functional.codebooks.floats import FLOAT_FORMATS, cast, float_quantize, leading_power
from qat.functional.codebooks.microscaling import mx_quantize, mx_scale
from qat.functional.codebooks.n2uq import n2uq_quantize
from qat.functional.codebooks.ternary import ternary_quantize, ternary_scale, ttq_quantize

INF, NAN = math.inf, math.nan


def leaf(values: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).clone().requires_grad_()


def slopes(y: Tensor, *inputs: Tensor) -> list[list[float]]:
    """The gradients of the sum of y."""
    return [gradient.tolist() for gradient in torch.autograd.grad(y.sum(), inputs)]


def same(got: Tensor, expected: object) -> None:
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# Errors

W, ONE = torch.zeros(4, 3), torch.tensor(1.0)
GRADIENTS = "clipped, approximate, error_decay, straight_through"
ERRORS = {
    "binary axis": (
        lambda: binary_quantize(W, 2),
        "binary_quantize: channel_axis must be in -2..1 for a weight of shape (4, 3), got 2",
    ),
    "binary axes": (
        lambda: binary_quantize(W, (0, -3)),
        "binary_quantize: channel_axis must be in -2..1 for a weight of shape (4, 3), got -3",
    ),
    "binary scalar": (
        lambda: binary_scale(ONE),
        "binary_scale: channel_axis must be None for a weight of shape (), got 0",
    ),
    "binary gradient": (
        lambda: binary_quantize(W, gradient="cliped"),
        f"binary_quantize: unknown gradient 'cliped'; known: {GRADIENTS}",
    ),
    "binary progress missing": (
        lambda: binary_quantize(W, gradient="error_decay"),
        "binary_quantize: gradient 'error_decay' needs progress, a number in 0..1, got None",
    ),
    "binary progress unused": (
        lambda: binary_quantize(W, gradient="clipped", progress=0.5),
        "binary_quantize: only gradient 'error_decay' takes progress, got it with 'clipped'",
    ),
    "binary progress range": (
        lambda: binary_quantize(W, gradient="error_decay", progress=90),
        "binary_quantize: progress must lie in 0..1, got 90",
    ),
    "ternary axis": (
        lambda: ternary_quantize(W, -3),
        "ternary_quantize: channel_axis must be in -2..1 for a weight of shape (4, 3), got -3",
    ),
    "ternary scale axis": (
        lambda: ternary_scale(W, 5),
        "ternary_scale: channel_axis must be in -2..1 for a weight of shape (4, 3), got 5",
    ),
    "ttq threshold": (
        lambda: ttq_quantize(W, ONE, ONE, 1.0),
        "ttq_quantize: threshold must be in 0..1 and below 1, got 1.0",
    ),
    "ttq threshold nan": (
        lambda: ttq_quantize(W, ONE, ONE, NAN),
        "ttq_quantize: threshold must be in 0..1 and below 1, got nan",
    ),
    "ttq positive": (
        lambda: ttq_quantize(W, torch.ones(4), ONE),
        "ttq_quantize: positive must broadcast to the weight's shape (4, 3), got shape (4,)",
    ),
    "ttq negative": (
        lambda: ttq_quantize(W, ONE, torch.ones(1, 4, 1)),
        "ttq_quantize: negative must broadcast to the weight's shape (4, 3), got shape (1, 4, 1)",
    ),
    "n2uq start": (
        lambda: n2uq_quantize(W, torch.zeros(3), torch.ones(3), ONE),
        "n2uq_quantize: start must have one element, got shape (3,)",
    ),
    "n2uq widths": (
        lambda: n2uq_quantize(W, ONE, torch.ones(2, 3), ONE),
        "n2uq_quantize: widths must have shape (n,), one for each step, got (2, 3)",
    ),
    "n2uq no widths": (
        lambda: n2uq_quantize(W, ONE, torch.ones(0), ONE),
        "n2uq_quantize: widths must have shape (n,), one for each step, got (0,)",
    ),
    "float format": (
        lambda: float_quantize(W, ONE, "int8"),
        "float_quantize: unknown format 'int8'; known: e4m3, e5m2, e3m2, e2m3, e2m1",
    ),
    "mx format": (
        lambda: mx_quantize(W, "fp4"),
        "mx_quantize: unknown format 'fp4'; known: e4m3, e5m2, e3m2, e2m3, e2m1, int8",
    ),
    "mx axis": (
        lambda: mx_quantize(W, "e2m1", axis=2),
        "mx_quantize: axis must be in -2..1 for x of shape (4, 3), got 2",
    ),
    "mx blocks": (
        lambda: mx_quantize(torch.zeros(4, 48), "e2m1"),
        "mx_quantize: block_size must divide the length of axis -1, which is 48, got 32; "
        "its divisors: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
    ),
    "mx block size": (lambda: mx_quantize(W, "e2m1", 0), "mx_quantize: block_size must be at least 1, got 0"),
}


@pytest.mark.parametrize(("call", "sentence"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_say_what_would_be_right(call, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_other_tensors_are_refused(dtype):
    x = torch.zeros(2, 2, dtype=dtype)
    calls = {
        "binary_quantize": lambda: binary_quantize(x),
        "binary_scale": lambda: binary_scale(x),
        "ternary_quantize": lambda: ternary_quantize(x),
        "ternary_scale": lambda: ternary_scale(x),
        "ttq_quantize": lambda: ttq_quantize(x, ONE, ONE),
        "n2uq_quantize": lambda: n2uq_quantize(x, ONE, torch.ones(3), ONE),
        "float_quantize": lambda: float_quantize(x, ONE, "e4m3"),
        "mx_quantize": lambda: mx_quantize(x, "e4m3"),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name}: x must be a floating-point tensor, got {dtype}$"):
            call()


# Binary


def test_binary_channels_and_signs():
    weight = torch.tensor([[1.0, -3.0], [0.0, -0.0], [-0.5, -1.5]])
    same(binary_quantize(weight), [[2.0, -2.0], [0.0, 0.0], [-1.0, -1.0]])
    same(binary_quantize(weight, 1), [[0.5, -1.5], [0.5, 1.5], [-0.5, -1.5]])
    same(binary_quantize(weight, (0, 1)), [[1.0, -3.0], [0.0, 0.0], [-0.5, -1.5]])
    same(binary_quantize(weight, (-2,)), binary_quantize(weight))
    same(binary_quantize(weight, None), [[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    same(binary_quantize(torch.tensor(-3.0), None), -3.0)


def test_binary_scale_is_positive_and_wide():
    weight = torch.tensor([[1.0, -3.0], [0.0, -0.0]], dtype=torch.float16)
    same(binary_scale(weight), [[2.0], [torch.finfo(torch.float32).tiny]])
    assert binary_scale(weight).dtype == torch.float32
    assert binary_scale(weight.double(), None).shape == (1, 1)
    same(binary_scale(weight, (0, 1)), [[1.0, 3.0], [torch.finfo(torch.float32).tiny] * 2])
    assert (binary_scale(torch.zeros(3, 0)) > 0).all()


def test_binary_gradients_at_their_bounds():
    values = [-1.0625, -1.0, -0.5, -0.0, 0.25, 1.0, 1.0625, INF, -INF, NAN]
    weight = leaf(values)
    by = {name: slopes(binary_quantize(weight, None, name), weight)[0] for name in ("clipped", "straight_through")}
    assert by["clipped"] == [0, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert by["straight_through"] == [1] * 10
    assert slopes(binary_quantize(weight, None, "approximate"), weight)[0] == [0, 0, 1, 2, 1.5, 0, 0, 0, 0, 0]
    for progress in (0.0, 0.5, torch.tensor(1.0)):
        t = 0.1 * 10 ** (2 * float(progress))
        expected = [max(1 / t, 1) * t * (1 - math.tanh(t * value) ** 2) for value in values]
        (got,) = slopes(binary_quantize(weight, None, "error_decay", progress), weight)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("rule", [binary_quantize, ternary_quantize])
def test_nan_spreads_over_its_channel_only(rule):
    weight = torch.tensor([[NAN, 1.0, 0.0], [1.0, -1.0, 0.5]])
    y = rule(weight)
    assert y.isnan().tolist() == [[True] * 3, [False] * 3]


# Ternary


def test_ternary_threshold_is_exclusive_and_the_scale_that_of_the_kept():
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


def test_ttq_zones_and_their_gradients():
    """threshold 0.25 of 4 is 1; a weight of exactly 1 becomes 0."""
    weight = leaf([4.0, 1.0625, 1.0, 0.0, -1.0, -1.0625, -2.0])
    positive, negative = leaf(3.0), leaf(5.0)
    y = ttq_quantize(weight, positive, negative, 0.25)
    same(y, [3.0, 3.0, 0.0, 0.0, 0.0, -5.0, -5.0])
    assert slopes(y, weight, positive, negative) == [[3.0, 3.0, 1.0, 1.0, 1.0, 5.0, 5.0], 2.0, -2.0]


def test_ttq_has_a_maximum_for_every_positive_level():
    weight = torch.tensor([[4.0, 0.5], [1.0, 0.5]])
    per_tensor = ttq_quantize(weight, ONE, ONE, 0.25)
    per_row = ttq_quantize(weight, torch.ones(2, 1), ONE, 0.25)
    per_column = ttq_quantize(weight, torch.ones(2), ONE, 0.25)
    per_element = ttq_quantize(weight, torch.ones(2, 2), ONE, 0.25)
    same(per_tensor, [[1.0, 0.0], [0.0, 0.0]])
    same(per_row, [[1.0, 0.0], [1.0, 1.0]])
    same(per_column, [[1.0, 1.0], [0.0, 1.0]])
    same(per_element, torch.ones(2, 2))


def test_ttq_edges():
    positive, negative = leaf(3.0), leaf(5.0)
    zeros = leaf([0.0, 0.0])
    assert slopes(ttq_quantize(zeros, positive, negative), zeros, positive) == [[1.0, 1.0], 0.0]
    weight = leaf([INF, 1.0, -INF])
    y = ttq_quantize(weight, positive, negative, 0.0)
    same(y, [3.0, 3.0, -5.0])
    assert slopes(y, weight, positive) == [[3.0, 3.0, 5.0], 2.0]
    same(ttq_quantize(torch.tensor([INF, 1.0, -INF]), positive.detach(), negative.detach()), [3.0, 0.0, -5.0])
    same(ttq_quantize(torch.tensor([NAN, 1.0]), positive.detach(), negative.detach()), [NAN, NAN])
    same(ttq_quantize(torch.tensor([0.0, 1.0], dtype=torch.float64), leaf(0.3, torch.float64).detach(), ONE)[1], 0.3)


# N2UQ: knots -1, 0, 2, 2.5; thresholds -0.5, 1, 2.25

KNOTS = {"start": -1.0, "widths": [1.0, 2.0, 0.5]}


def n2uq(x: Tensor, step: Tensor = ONE, qmin: int = 0) -> Tensor:
    return n2uq_quantize(x, torch.tensor(KNOTS["start"]), torch.tensor(KNOTS["widths"]), step, qmin)


def test_n2uq_levels_begin_above_their_thresholds():
    x = torch.tensor([-INF, -9.0, -0.5, -0.4375, 0.0, 1.0, 1.0625, 2.25, 2.3125, 9.0, INF, NAN])
    levels = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, NAN]
    same(n2uq(x), levels)
    same(n2uq(x, torch.tensor(0.5), -2), [0.5 * (level - 2) for level in levels])
    same(n2uq(x.to(torch.bfloat16)), levels)
    assert n2uq_quantize(x, torch.tensor(NAN), torch.ones(3), ONE).isnan().all()
    assert n2uq_quantize(x, ONE, torch.tensor([1.0, NAN, 1.0]), ONE).isnan().all()


def test_n2uq_slopes_of_the_segments():
    """Bounds inside, an inner knot with the segment on its left."""
    x = leaf([-INF, -1.0625, -1.0, 0.0, 0.5, 2.0, 2.25, 2.5, 2.5625, INF, NAN])
    assert slopes(n2uq(x, torch.tensor(0.5)), x) == [[0, 0, 0.5, 0.5, 0.25, 0.25, 1.0, 1.0, 0, 0, 0]]


def test_n2uq_gradients_of_the_parameters_by_hand():
    """At 1.5, in segment 1 from 0 to 2: f = step * (qmin + 1 + (x - start - width 0) / width 1)."""
    x, start, widths, step = leaf(1.5), leaf(-1.0), leaf([1.0, 2.0, 0.5]), leaf(4.0)
    y = n2uq_quantize(x, start, widths, step, -1)
    same(y.detach(), 4.0)
    assert slopes(y, x, start, widths, step) == [2.0, -2.0, [-2.0, -1.5, 0.0], 1.0]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8, 15, 255])
def test_n2uq_with_equal_widths_is_the_uniform_quantizer(number):
    """Away from ties, for every number of steps that the bisection may meet."""
    x = torch.linspace(-2.0, number + 2.0, 997, dtype=torch.float64) + 1e-4
    y = n2uq_quantize(x, x.new_zeros(1), x.new_ones(number), x.new_ones(()))
    same(y, x.round().clamp(0, number))


def test_n2uq_second_derivatives_are_those_of_the_broken_line():
    """The line drawn as a sum of clipped ramps, the rounding residual constant."""
    inputs = [leaf([-2.0, -0.7, 0.3, 1.9, 2.4, 5.0]), leaf(-1.0), leaf([1.0, 2.0, 0.5]), leaf(0.7)]
    inputs = [each.detach().double().requires_grad_() for each in inputs]

    def line(x: Tensor, start: Tensor, widths: Tensor, step: Tensor) -> Tensor:
        begin = start + torch.cat([widths.new_zeros(1), widths.cumsum(0)[:-1]])
        position = ((x[:, None] - begin) / widths).clamp(0, 1).sum(-1)
        level = (x[:, None] > begin + widths / 2).sum(-1)
        return step * (position + (level - position).detach() - 3)

    tests = []
    for function in (partial(n2uq_quantize, qmin=-3), line):
        first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        total = sum((gradient.sin().sum() for gradient in first), start=inputs[0].new_zeros(()))
        tests.append([*first, *torch.autograd.grad(total, inputs)])
    for got, expected in zip(*tests, strict=True):
        torch.testing.assert_close(got, expected)


# Floats

TORCH_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def numbers_of(name: str) -> Tensor:
    """Every finite number of the format >= 0, in ascending order, from the meaning of its bits."""
    exponent_bits, mantissa_bits, bias, largest = FLOAT_FORMATS[name]
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            found.append(math.ldexp(fraction + (exponent > 0), max(exponent, 1) - bias))
    return torch.tensor([number for number in found if number <= largest], dtype=torch.float64)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_numbers_stay_and_midpoints_go_to_the_even_neighbour(name):
    numbers = numbers_of(name)
    middle = (numbers[1:] + numbers[:-1]) / 2
    even = torch.where(torch.arange(len(middle)) % 2 == 0, numbers[:-1], numbers[1:])
    for sign in (1, -1):
        for dtype in (torch.float32, torch.float64):
            same(cast((sign * numbers).to(dtype), name), sign * numbers)
            same(cast((sign * middle).to(dtype), name), sign * even)
            below, above = middle.to(dtype).nextafter(-ONE), middle.to(dtype).nextafter(1e9 * ONE)
            same(cast(sign * below, name), sign * numbers[:-1])
            same(cast(sign * above, name), sign * numbers[1:])


@pytest.mark.parametrize("name", TORCH_FORMATS)
def test_fp8_casts_as_torch_does(name):
    """Every number of the format, every midpoint and their float32 neighbours, and numbers in between."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(TORCH_FORMATS[name]).float()
    numbers = every[every.isfinite()].sort().values
    same(numbers[numbers >= 0].unique().double(), numbers_of(name))
    middle = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middle, middle.nextafter(INF * ONE), middle.nextafter(-INF * ONE)])
    x = torch.cat([x, torch.lerp(numbers[:-1], numbers[1:], torch.linspace(0, 1, len(numbers) - 1))])
    same(cast(x, name), x.to(TORCH_FORMATS[name]).float())
    assert cast(torch.tensor(-0.0), name).signbit()


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float_edges(name):
    largest, scale = FLOAT_FORMATS[name].largest, leaf(0.5, torch.float64)
    smallest = numbers_of(name)[1].item()
    x = [INF, -INF, 1.0625 * largest, largest / 2, -largest / 2, smallest / 2, smallest / 4, 1e-45, 0.0]
    x = leaf(x, torch.float64)
    y = float_quantize(x, scale, name)
    same(y, [largest / 2, -largest / 2, largest / 2, largest / 2, -largest / 2, smallest / 2, 0.0, 0.0, 0.0])
    assert slopes(y, x, scale) == [[0, 0, 0, 1, 1, 1, 1, 1, 1], largest - smallest / 2]
    assert float_quantize(torch.tensor([NAN, 1.0]), scale, name).isnan().tolist() == [True, False]


def test_leading_power_is_exact_next_to_every_power():
    for dtype, lowest, highest in ((torch.float32, -127, 127), (torch.float64, -127, 135), (torch.float32, 0, 2)):
        powers = torch.tensor([2.0**k for k in range(lowest, highest + 1)], dtype=dtype)
        same(leading_power(powers, lowest, highest), powers)
        same(leading_power(powers.nextafter(INF * ONE), lowest, highest), powers)
        same(leading_power(powers[1:].nextafter(-ONE), lowest, highest), powers[:-1])
        same(leading_power(torch.tensor([0.0, INF], dtype=dtype), lowest, highest), powers[[0, -1]])


# Microscaling


def test_mx_scales_are_the_powers_of_the_standard():
    blocks = torch.tensor([[1.0, -7.9], [8.0, 0.0], [3e-45, 0.0], [0.0, 0.0], [-3.4e38, 1.0]])
    same(mx_scale(blocks, "e4m3"), [[2.0**-6], [2.0**-5], [2.0**-127], [1.0], [2.0**119]])
    same(mx_scale(blocks, "e2m1"), [[1.0], [2.0], [2.0**-127], [1.0], [2.0**125]])
    same(mx_scale(blocks, "int8"), [[4.0], [8.0], [2.0**-127], [1.0], [2.0**127]])
    same(mx_scale(torch.tensor([[1e300]], dtype=torch.float64), "e5m2"), [[2.0**127]])
    assert mx_scale(blocks.half(), "e4m3").dtype == torch.float32


def test_mx_blocks_by_hand():
    x = leaf([[7.9, -6.0, 2.5, 0.25, 1.0, 0.3, -0.125, 0.0]])
    y = mx_quantize(x, "e2m1", block_size=4)
    same(y, [[6.0, -6.0, 2.0, 0.0, 1.0, 0.25, -0.125, 0.0]])
    assert slopes(y, x) == [[[0, 1, 1, 1, 1, 1, 1, 1]]]
    same(mx_quantize(x.detach().T, "e2m1", 4, axis=0), y.detach().T)
    y = mx_quantize(leaf([1.99, 1.0 + 1 / 128, -1.0 - 3 / 128, 1 / 256]), "int8")
    same(y.detach(), [127 / 64, 1.0, -1.0 - 2 / 64, 0.0])


def test_mx_block_sizes():
    x = torch.tensor([[8.0, 0.01, 0.01, 8.0, 0.02, 0.02]])
    assert torch.equal(mx_quantize(x, "e4m3"), mx_quantize(x, "e4m3", block_size=6))
    same(mx_quantize(x, "int8", 1), [[float(int(v * 2.0**k + 0.5)) / 2.0**k for v, k in zip(
        x[0].tolist(), [3, 13, 13, 3, 12, 12], strict=True)]])  # fmt: skip
    same(mx_quantize(torch.tensor(5.1), "e2m1"), 6.0)
    assert mx_quantize(torch.zeros(3, 0), "e4m3").shape == (3, 0)
    assert mx_quantize(torch.zeros(0, 64), "e4m3").shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*FLOAT_FORMATS, "int8"])
def test_mx_stays_finite_beside_infinity_and_loses_a_block_to_nan(name, dtype):
    x = leaf([[INF, 1.0, -INF, 0.0], [1.0, NAN, 0.0, 2.0], [0.0, -0.0, 0.0, 0.0], [1.0, 1.0, -1.0, 0.0]], dtype)
    y = mx_quantize(x, name)
    assert y[0].isfinite().all() and y[0, 0] == -y[0, 2] and y[0, 0] > torch.finfo(torch.float16).max / 2
    assert y[1].isnan().all()
    same(y[2:].detach(), [[0.0] * 4, [1.0, 1.0, -1.0, 0.0]])
    assert slopes(y, x)[0] == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
