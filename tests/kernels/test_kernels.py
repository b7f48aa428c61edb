"""The C kernels against NumPy in float64: digits, ends of grids, and where the plain formula computes instead."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qat.codes.operators.norm import norm_quantize_backward, statistics
from qat.functional import fake_quantize, lsq_plus_quantize, lsq_quantize
from qat.kernels import choose, plain_formulas
from qat.kernels.cpu import compiler
from qat.ranges import initial_range
from tests.references import rule_specs
from tests.references.cases_fused import two_threads
from tests.references.cases_kernels import draw

__all__ = ["two_threads"]  # a fixture

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
CASES = {
    "flat": lambda x: x,
    "channels_last": lambda x: x.reshape(2, 5, 3, -1).to(memory_format=torch.channels_last),
    "transposed": lambda x: x.reshape(10, -1).t(),
}


@pytest.mark.parametrize("layout", CASES)
@pytest.mark.parametrize("count", [30, 30 * 1111, 30 * 7919])
@pytest.mark.parametrize(("zero", "qmin", "qmax"), [(3.2, 0, 255), (None, -8, 7), (0.2, -128, 127)])
def test_per_tensor(layout: str, count: int, zero: float | None, qmin: int, qmax: int) -> None:
    x = CASES[layout](draw(count) * 4).detach()
    grad, found = draw(*x.shape, seed=1), []
    for plain in (False, True):
        leaves = [each.clone().requires_grad_() for each in (x, torch.tensor(0.037), torch.tensor(zero or 0.0))]
        leaves = leaves[:2] if zero is None else leaves
        with plain_formulas() if plain else torch.enable_grad():
            assert (choose(*leaves) is None) == plain
            y = (lsq_quantize if zero is None else lsq_plus_quantize)(*leaves, qmin, qmax, 0.5)  # type: ignore[operator]
            found.append((y, *torch.autograd.grad(y, leaves, grad)))
    (y, grad_x, *sums), (formula, expected_x, *expected) = found
    assert y.stride() == x.stride() and torch.allclose(y, formula, rtol=1e-6, atol=0)
    assert torch.equal(grad_x, expected_x)
    atol = 2e-4 * float(grad.norm())
    assert all(torch.allclose(one, other, rtol=1e-5, atol=atol) for one, other in zip(sums, expected, strict=True))


def test_everything_else_gets_the_plain_formula() -> None:
    scale = torch.tensor(0.5)
    x = draw(4, 6)
    others = [x.double(), x.bfloat16(), x[:, ::2], x[:0], torch.empty(4, 6, device="meta"), x.expand(3, 4, 6)]
    assert [choose(other, scale) for other in others] == [None] * 6
    assert choose(x, torch.ones(6)) is None and choose(x, torch.ones(1, 6)) is None
    assert choose(x, scale.double()) is None and choose(x, torch.ones(4, 1), torch.ones(4, 1)) is None
    with plain_formulas():
        assert choose(x, scale) is None
    assert choose(x, scale) is not None
    for w in (x, draw(4, 5, 3, 3), draw(4, 5, 3, 3).to(memory_format=torch.channels_last)):
        assert choose(w, torch.ones(4, *[1] * (w.dim() - 1))) is not None

    def inside(x: Tensor) -> Tensor:
        assert choose(x, scale) is None
        return fake_quantize(x, scale, torch.tensor(0.0), -8, 7)

    assert torch.equal(torch.func.vmap(inside)(x), fake_quantize(x, scale, torch.tensor(0.0), -8, 7))
    doubled = torch.func.jvp(inside, (x,), (torch.ones_like(x),))[1]
    assert set(doubled.unique().tolist()) <= {0.0, 1.0}


def test_second_derivatives_are_those_of_the_formula() -> None:
    results = []
    for plain in (False, True):
        x, scale = draw(50).requires_grad_(), torch.tensor(0.3, requires_grad=True)
        with plain_formulas() if plain else torch.enable_grad():
            y = lsq_quantize(x, scale, -2, 1).square().sum()
            first = torch.autograd.grad(y, (x, scale), create_graph=True)
            second = torch.autograd.grad(first[0].sum() + first[1], (x, scale))
        results.append([*first, *second])
    for fast, formula in zip(*results, strict=True):
        assert torch.allclose(fast, formula, rtol=1e-5)


@pytest.mark.parametrize("outlier", [None, 1e3, 1e4, -3e5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_keep_their_digits(layout: torch.memory_format, outlier: float | None) -> None:
    """Far from zero; and behind an outlier in the first place, which the sums are shifted by, and in the middle."""
    without = draw(6, 20, 64, 64).to(memory_format=layout)
    y = without * 0.01 + 1000 if outlier is None else without.clone()
    if outlier is not None:
        y[0, 3, 0, 0] = y[2, 7, 5, 5] = outlier
    running, axes = (torch.zeros(20), torch.ones(20)), (0, 2, 3)
    mean, inverse = statistics(y, 1e-9, running, 0.25)
    # Without vector instructions up to 4096 squares are added to that of the outlier in float32.
    digits = {"rtol": 1e-7} if outlier is None else {"rtol": 2e-5, "atol": 1e-6}
    assert torch.allclose(mean.double(), y.double().mean(axes), **digits)
    exact = (y.double().var(axes, correction=0) + 1e-9).rsqrt()
    assert torch.allclose(inverse.double(), exact, rtol=1e-3 if outlier is None else 1e-4)
    assert torch.allclose(running[0].double(), mean.double() / 4, rtol=1e-6)
    rtol = 1e-6 if outlier is None else 1e-4
    assert torch.allclose(running[1].double(), 0.75 + y.double().var(axes) / 4, rtol=rtol)
    if outlier is not None:
        others = [channel for channel in range(20) if channel not in (3, 7)]
        assert torch.equal(mean[others], statistics(without, 1e-9, running, 0.25)[0][others])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_squares_beyond_a_float_are_summed_in_double(layout: torch.memory_format) -> None:
    """A BatchNorm that has seen little multiplies by 1e9 and more. torch's own overflows in float32: the reference is
    its float64."""
    drawn = draw(6, 20, 16, 16).to(memory_format=layout)
    y, grad = drawn * 3e18, drawn.flip(0) * 1e21
    running = torch.zeros(20), torch.ones(20)
    mean, inverse = statistics(y, 1e-5, running, 0.1)
    x, ones, zeros = (each.double().requires_grad_() for each in (y, torch.ones(20), torch.zeros(20)))
    expected = zeros.detach().clone(), ones.detach().clone()
    torch.nn.functional.batch_norm(x, *expected, ones, zeros, training=True).backward(grad.double())
    assert all(torch.allclose(ours.double(), theirs, rtol=1e-5) for ours, theirs in zip(running, expected, strict=True))
    grid = [torch.tensor(0.1), torch.tensor(0.0), torch.tensor(0.0)]
    norm = [torch.ones(20), torch.zeros(20), mean, inverse]
    found = norm_quantize_backward(grad, y, norm, [-math.inf, math.inf], grid, [-127, 127, 0, 1.0, 0], True, True)
    for ours, theirs in zip(found, (x.grad, ones.grad, zeros.grad), strict=False):
        assert torch.allclose(ours.double(), theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("signed", [False, True])
def test_the_range_of_least_squared_error_is_found_as_by_the_formula(signed: bool) -> None:
    spec = rule_specs.plain(bits=4, signed=signed, symmetric=False, init="mse")
    values = draw(1, 30_001).exp()
    with plain_formulas():
        expected = initial_range(values, spec)
    assert all(torch.equal(fast, plain) for fast, plain in zip(initial_range(values, spec), expected, strict=True))
    assert expected[1] < values.max()  # it does shrink


CLIPS = ((-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0), (-1.0, 1.0))


def neighbours(value: float) -> list[float]:
    """Four floats on either side of a value, and itself."""
    found = [np.float32(value)]
    for _ in range(4):
        found = [np.nextafter(found[0], np.float32(-np.inf)), *found, np.nextafter(found[-1], np.float32(np.inf))]
    return [float(each) for each in found]


def gradient(z: Tensor, step: float, zero: float, low: int, high: int, clip: tuple[float, float]) -> Tensor:
    """Of z behind a norm that does nothing, for a gradient of ones."""
    ones, zeros = torch.ones(z.shape[1]), torch.zeros(z.shape[1])
    found = norm_quantize_backward(
        torch.ones_like(z), z, [ones, zeros, zeros, ones], list(clip),
        [torch.tensor(step), torch.tensor(0.0), torch.tensor(zero)], [low, high, 0, 1.0, 0], False, True,
    )  # fmt: skip
    return found[0]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("step", [1.0, 0.02, 1 / 3, 7.3e-6, 1e-20, 3.7e6, 1e18])
def test_a_gradient_passes_where_the_quotient_lies_within_the_bounds(step: float, layout: torch.memory_format) -> None:
    for (low, high), share, clip in itertools.product(((0, 255), (-128, 127), (-1, 1)), (0, 0.3, 1), CLIPS):
        zero = round(low + share * (high - low))
        places = [0.0, (low - zero) * step, (high - zero) * step, *(end for end in clip if math.isfinite(end))]
        values = sorted({each for place in places for each in neighbours(place)} | {math.inf, -math.inf, math.nan})
        z = torch.tensor(values, dtype=torch.float32).repeat(3).view(1, -1, 3, 1).expand(2, -1, 3, 5)
        z = z.contiguous(memory_format=layout)
        with np.errstate(all="ignore"):
            v = z.numpy() / np.float32(step)
            inside = (v >= low - zero) & (v <= high - zero) & (z.numpy() > clip[0]) & (z.numpy() < clip[1])
        found = gradient(z, step, float(zero), low, high, clip)
        finite = np.isfinite(z.numpy())  # elsewhere the norm's own gradient is 0 * inf
        assert np.array_equal(found.numpy()[finite], inside.astype(np.float32)[finite]), (low, high, zero, clip)
