"""The C kernels against NumPy in float64, and what happens where they cannot be had."""

import numpy as np
import pytest
import torch
from torch import Tensor

from qat.functional import fake_quantize, lsq_plus_quantize, lsq_quantize
from qat.kernels import choose, plain_formulas
from qat.kernels.cpu import compiler
from qat.kernels.operators.quantizers import statistics
from qat.ranges import initial_range
from tests.references import rule_specs
from tests.references.cases_fused import two_threads
from tests.references.cases_kernels import draw

__all__ = ["two_threads"]  # a fixture


needs_kernels = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
CASES = {
    "flat": lambda x: x,
    "channels_last": lambda x: x.reshape(2, 5, 3, -1).to(memory_format=torch.channels_last),
    "transposed": lambda x: x.reshape(10, -1).t(),
}


def reference(
    x: Tensor, grad: Tensor, scale: Tensor, zero: float, qmin: int, qmax: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """y, and the gradients of x, scale and zero point, as the papers write them."""
    # The quotient is rounded to float32, as every implementation rounds it: ties are decided there.
    v = (x.detach().numpy() / scale.detach().numpy()).astype(np.float32).astype(np.float64)
    s, g = scale.detach().double().numpy(), grad.double().numpy()
    y = (np.clip(np.rint(v) + zero, qmin, qmax) - zero) * s
    inside = (v >= qmin - zero) & (v <= qmax - zero)
    slope = np.where(inside, np.rint(v) - v, np.clip(v, qmin - zero, qmax - zero))
    axes = tuple(i for i, n in enumerate(scale.shape) if n == 1) if scale.dim() else None
    return (
        y, np.where(inside, g, 0), (g * slope).sum(axes).reshape(scale.shape),
        np.where(inside, 0, -s * g).sum(axes).reshape(scale.shape),
    )  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("layout", CASES)
@pytest.mark.parametrize("count", [30, 30 * 1111, 30 * 7919])
@pytest.mark.parametrize(("zero", "qmin", "qmax"), [(3.0, 0, 255), (None, -8, 7), (0.0, -128, 127)])
def test_per_tensor(layout: str, count: int, zero: float | None, qmin: int, qmax: int) -> None:
    x = CASES[layout](draw(count) * 4).detach().requires_grad_()
    grad = draw(*x.shape, seed=1)
    scale = torch.tensor(0.037, requires_grad=True)
    point = None if zero is None else torch.tensor(zero + 0.2, requires_grad=True)
    assert choose(x, scale, point) is not None
    rest = (qmin, qmax, 0.5)
    y = lsq_quantize(x, scale, *rest) if point is None else lsq_plus_quantize(x, scale, point, *rest)
    y.backward(grad)
    expected = reference(x, grad, scale, zero or 0.0, qmin, qmax)
    assert y.stride() == x.stride() and x.grad is not None and scale.grad is not None
    np.testing.assert_allclose(y.detach().numpy(), expected[0], rtol=1e-6)
    np.testing.assert_array_equal(x.grad.numpy(), expected[1].astype(np.float32))
    size = float(grad.norm()) * 200
    np.testing.assert_allclose(scale.grad.numpy(), expected[2] * 0.5, rtol=1e-5, atol=1e-6 * size)
    if point is not None:
        assert point.grad is not None
        np.testing.assert_allclose(point.grad.numpy(), expected[3] * 0.5, rtol=1e-5, atol=1e-6 * size)


@needs_kernels
@pytest.mark.parametrize("shape", [(3, 1), (7, 5, 3, 3), (64, 700), (5, 2, 2, 2, 9)])
@pytest.mark.parametrize("nearest", [False, True])
def test_per_channel(shape: tuple[int, ...], nearest: bool) -> None:
    w = draw(*shape)
    if nearest and len(shape) > 3:
        w = w.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    w.requires_grad_()
    grad = draw(*shape, seed=1)
    scale = (draw(shape[0], seed=2).abs() * 0.02 + 0.001).reshape(-1, *[1] * (len(shape) - 1)).requires_grad_()
    assert choose(w, scale) is not None
    y = lsq_quantize(w, scale, -127, 127)
    y.backward(grad)
    expected = reference(w, grad, scale, 0.0, -127, 127)
    assert w.grad is not None and scale.grad is not None and y.stride() == w.stride()
    np.testing.assert_allclose(y.detach().numpy(), expected[0], rtol=1e-6)
    np.testing.assert_array_equal(w.grad.numpy(), expected[1].astype(np.float32))
    np.testing.assert_allclose(scale.grad.numpy(), expected[2], rtol=1e-4, atol=1e-4)


@needs_kernels
def test_ties_bounds_nan_and_infinity() -> None:
    x = torch.tensor([0.25, 0.75, -0.25, 63.5, 63.75, -64.0, -64.5, float("inf"), float("-inf"), float("nan")])
    x.requires_grad_()
    scale = torch.tensor(0.5, requires_grad=True)
    y = lsq_quantize(x, scale, -128, 127)
    y.backward(torch.ones(10))
    assert y[:9].tolist() == [0.0, 1.0, 0.0, 63.5, 63.5, -64.0, -64.0, 63.5, -64.0] and y[9].isnan()
    assert x.grad is not None and scale.grad is not None
    assert x.grad.tolist() == [1, 1, 1, 1, 0, 1, 0, 0, 0, 0] and scale.grad.isnan()


@needs_kernels
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

    def inside(x: Tensor) -> Tensor:
        assert choose(x, scale) is None
        return fake_quantize(x, scale, torch.tensor(0.0), -8, 7)

    assert torch.equal(torch.func.vmap(inside)(x), fake_quantize(x, scale, torch.tensor(0.0), -8, 7))
    doubled = torch.func.jvp(inside, (x,), (torch.ones_like(x),))[1]
    assert set(doubled.unique().tolist()) <= {0.0, 1.0}


@needs_kernels
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


@needs_kernels
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_keep_their_digits_far_from_zero(layout: torch.memory_format) -> None:
    y = (draw(6, 20, 31, 33) * 0.01 + 1000).to(memory_format=layout)
    running = torch.zeros(20), torch.ones(20)
    mean, inverse = statistics(y, 1e-9, running, 0.25)
    expected = y.double().var((0, 2, 3), correction=0)
    assert torch.allclose(mean.double(), y.double().mean((0, 2, 3)), rtol=1e-7)
    assert torch.allclose(inverse.double(), (expected + 1e-9).rsqrt(), rtol=1e-3)
    assert torch.allclose(running[0].double(), mean.double() / 4, rtol=1e-6)
    assert torch.allclose(running[1].double(), 0.75 + y.double().var((0, 2, 3)) / 4, rtol=1e-6)


@needs_kernels
@pytest.mark.parametrize("outlier", [1e3, 1e4, -3e5])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_moments_keep_their_digits_behind_an_outlier(layout: torch.memory_format, outlier: float) -> None:
    """In the first place, which the sums are shifted by, and in the middle."""
    without = draw(6, 20, 64, 64).to(memory_format=layout)
    y = without.clone()
    y[0, 3, 0, 0] = y[2, 7, 5, 5] = outlier
    running = torch.zeros(20), torch.zeros(20)
    mean, inverse = statistics(y, 0.0, running, 1.0)
    assert torch.allclose(mean.double(), y.double().mean((0, 2, 3)), rtol=2e-5, atol=1e-6)
    # Without vector instructions up to 4096 squares are added to that of the outlier in float32.
    assert torch.allclose(running[1].double(), y.double().var((0, 2, 3)), rtol=1e-4)
    assert torch.allclose(inverse.double(), y.double().var((0, 2, 3), correction=0).rsqrt(), rtol=1e-4)
    others = [channel for channel in range(20) if channel not in (3, 7)]
    assert torch.equal(mean[others], statistics(without, 0.0, running, 1.0)[0][others])


@needs_kernels
@pytest.mark.parametrize("signed", [False, True])
def test_the_range_of_least_squared_error_is_found_as_by_the_formula(signed: bool) -> None:
    spec = rule_specs.plain(bits=4, signed=signed, symmetric=False, init="mse")
    values = draw(1, 30_001).exp()
    with plain_formulas():
        expected = initial_range(values, spec)
    assert all(torch.equal(fast, plain) for fast, plain in zip(initial_range(values, spec), expected, strict=True))
    assert expected[1] < values.max()  # it does shrink
