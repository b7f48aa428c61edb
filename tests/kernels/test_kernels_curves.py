"""The C kernels of activation curves and softmax against NumPy in float64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases_formulas import draw
from cases_fused import two_threads
from torch import Tensor

from qat.kernels.cpu import compiler
from qat.kernels.operators.curves import (
    CURVE_NUMBERS,
    curve_quantize,
    curve_quantize_backward,
    softmax_quantize,
    softmax_quantize_backward,
)

__all__ = ["two_threads"]  # a fixture

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")

Array = np.ndarray
STEP, ZERO, LOW, HIGH = 0.031, 17.0, 0, 255
SMALLEST = torch.tensor(1e-9)


def phi(x: Array) -> Array:
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.ravel()]).reshape(x.shape)


def gelu(x: Array) -> tuple[Array, Array]:
    return x * phi(x), phi(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def gelu_tanh(x: Array) -> tuple[Array, Array]:
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + np.tanh(inner)), 0.5 * (1 + np.tanh(inner)) + 0.5 * x * (1 - np.tanh(inner) ** 2) * slope


def silu(x: Array) -> tuple[Array, Array]:
    share = 1 / (1 + np.exp(-x))
    return x * share, share + x * share * (1 - share)


def hardswish(x: Array) -> tuple[Array, Array]:
    return x * np.clip(x + 3, 0, 6) / 6, np.where(x <= -3, 0, np.where(x < 3, x / 3 + 0.5, 1))


FORMULAS: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "hardswish": hardswish,
}  # fmt: skip


def quantizer(y: Array, step: float, zero: float) -> tuple[Array, Array, Array]:
    """Of every element the code before rounding, whether the gradient passes, and the slope with respect to step."""
    v = y / step
    inside = (v >= LOW - zero) & (v <= HIGH - zero)
    return v + zero, inside, np.where(inside, np.rint(v) - v, np.clip(v, LOW - zero, HIGH - zero))


def near_a_tie(exact: Array) -> Array:
    """Where float32 may decide otherwise than float64."""
    near: Array = np.abs(exact - np.floor(exact) - 0.5) < 1e-4
    return near


def assert_codes(codes: Tensor, exact: Array) -> None:
    expected = np.clip(np.rint(exact), LOW, HIGH)
    tie = near_a_tie(exact)
    assert np.all((codes.numpy() == expected) | tie) and tie.mean() < 1e-3


def assert_scale_gradient(found: Tensor, exact: Array, grad: Array, slope: Array) -> None:
    """sum(grad * slope), in which the slope jumps by one at a tie."""
    allowed = 1e-5 * np.abs(grad * slope).sum() + np.abs(grad[near_a_tie(exact)]).sum()
    np.testing.assert_allclose(found.item(), (grad * slope).sum(), rtol=0, atol=allowed)


@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (41, 3001)])
@pytest.mark.parametrize("curve", CURVE_NUMBERS)
def test_curves(curve: str, shape: tuple[int, ...]) -> None:
    x, grad, scale, zero = draw(*shape) * 3, draw(*shape, seed=1), torch.tensor(STEP), torch.tensor(ZERO)
    grid = (scale, SMALLEST, zero, LOW, HIGH, 0, 0.5, False)
    codes, numbers = curve_quantize(x, curve, *grid)
    value, rise = FORMULAS[curve](x.double().numpy())
    exact, inside, slope = quantizer(value, STEP, ZERO)
    assert_codes(codes, exact)
    assert torch.allclose(numbers, torch.tensor([STEP, ZERO]))
    grad_x, grad_scale = curve_quantize_backward(grad, x, curve, *grid)
    g = grad.double().numpy()
    # Just outside, where float32 may see it inside.
    decided = inside | (np.minimum(np.abs(exact - LOW), np.abs(exact - HIGH)) > 1e-4)
    np.testing.assert_allclose(grad_x.numpy()[decided], (g * inside * rise)[decided], rtol=1e-5, atol=2e-6)
    assert_scale_gradient(grad_scale, exact, 0.5 * g, slope)


@pytest.mark.parametrize("curve", CURVE_NUMBERS)
def test_curves_far_out(curve: str) -> None:
    """No overflow on the way, NaN is told, and far below zero there is nothing."""
    x = torch.tensor([-3e38, -1e4, -100.0, -13.0, 0.0, 100.0, 1e4, 3e38])
    grid = (torch.tensor(1.0), SMALLEST, torch.tensor(3.0), LOW, HIGH, 0, 1.0, False)
    codes, numbers = curve_quantize(x, curve, *grid)
    assert codes.tolist() == [3, 3, 3, 3, 3, 103, 255, 255] and numbers.tolist() == [1.0, 3.0]
    grad_x, _ = curve_quantize_backward(torch.ones(8), x, curve, *grid)
    assert grad_x[:3].abs().max() < 1e-30 and grad_x[3:].tolist()[1:] == [0.5, 1.0, 0.0, 0.0]
    x[2] = math.nan
    assert curve_quantize(x, curve, *grid)[1].isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 50, 197)])
@pytest.mark.parametrize("multiplier", [1.0, 0.125, -2.0])
def test_softmax(shape: tuple[int, ...], multiplier: float) -> None:
    x, grad, scale = draw(*shape) * 3, draw(*shape, seed=1), torch.tensor(0.5 / 255)
    grid = (scale, SMALLEST, None, LOW, HIGH, 0, 1.0, False)
    probabilities, codes, _ = softmax_quantize(x, multiplier, *grid)
    scores = x.double().numpy() * multiplier
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities.numpy(), p, rtol=2e-6, atol=1e-12)
    exact, inside, slope = quantizer(p, scale.item(), 0.0)
    assert_codes(codes, exact)
    grad_x, grad_scale = softmax_quantize_backward(grad, probabilities, multiplier, *grid)
    passed = grad.double().numpy() * inside
    expected = multiplier * p * (passed - (passed * p).sum(-1, keepdims=True))
    np.testing.assert_allclose(grad_x.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert_scale_gradient(grad_scale, exact, grad.double().numpy(), slope)


def test_masked_scores() -> None:
    """Those at -inf have probability 0 exactly; a row of nothing else is NaN, and told."""
    x = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, 1.0, -math.inf]])
    grid = (torch.tensor(1 / 255), SMALLEST, None, LOW, HIGH, 0, 1.0, False)
    probabilities, codes, numbers = softmax_quantize(x, 0.3, *grid)
    assert probabilities.tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]] and codes[1].tolist() == [0, 255, 0]
    assert not numbers.isnan().any()
    x[0] = -math.inf
    probabilities, _, numbers = softmax_quantize(x, 0.3, *grid)
    assert probabilities[0].isnan().all() and probabilities[1].tolist() == [0.0, 1.0, 0.0] and numbers[0].isnan()


def test_compiled_code_knows_the_strides_of_softmaxs_gradient() -> None:
    """Where the probabilities' gradient comes transposed."""
    probabilities, grad = torch.softmax(torch.randn(2, 5, 7), -1), torch.randn(2, 7, 5).mT
    learned = (torch.tensor(0.01), torch.tensor(0.001), None, 0, 255, 0, 1.0, False)
    operator = torch.ops.qat.softmax_quantize_backward.default
    torch.library.opcheck(operator, (grad, probabilities, 1.0, *learned), test_utils="test_faketensor")
