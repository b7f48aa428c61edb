"""PACT, DoReFa, APoT, powers of two and learned bits against NumPy, their surrogates, and under torch's transforms."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from qat.functional.codebooks.apot import apot_levels, apot_quantize, normalize_weight
from qat.functional.dorefa import dorefa_quantize_activation, dorefa_quantize_weight
from qat.functional.learned_bits import learned_bits_quantize
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


# ---------------------------------------------------------------- against NumPy and the surrogates


def nearest_numpy(v: Array, levels: tuple[float, ...]) -> Array:
    """By distance to every level; argmin takes the first of two equal ones, the smaller magnitude."""
    return np.sign(v) * np.asarray(levels)[np.argmin(np.abs(np.abs(v)[..., None] - np.asarray(levels)), axis=-1)]


def pact_numpy(x: Array, alpha: Array) -> Array:
    return alpha / 7 * np.round(np.clip(x, 0, alpha) * 7 / alpha)


def dorefa_numpy(weight: Array) -> Array:
    squashed = np.tanh(weight)
    largest = np.abs(squashed).max(axis=1, keepdims=True)
    return 2 * np.round((squashed / (2 * largest) + 0.5) * 7) / 7 - 1


def apot_numpy(x: Array, alpha: Array) -> Array:
    return alpha * nearest_numpy(np.clip(x / alpha, -1, 1), apot_levels(3))


def learned_bits_numpy(x: Array, reach: Array, bits: Array) -> Array:
    qmax = 2 ** (np.round(bits) - 1) - 1
    return reach / qmax * np.clip(np.round(x * qmax / reach), -qmax, qmax)


def pact_surrogate(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.where(x > alpha, alpha, torch.where(x < 0, 0, x))


def dorefa_surrogate(weight: Tensor) -> Tensor:
    squashed = torch.tanh(weight)
    return squashed / squashed.abs().amax(1, keepdim=True)


def apot_surrogate(x: Tensor, alpha: Tensor) -> Tensor:
    v = (x / alpha).detach().clamp(-1, 1)
    levels = double(*apot_levels(3))
    nearest = levels[(v.abs()[..., None] - levels).abs().argmin(-1)] * torch.sign(v)
    return torch.where(x.abs() <= alpha, x + alpha * (nearest - v), alpha * torch.sign(x))


def power_of_two_surrogate(scale: Tensor) -> Tensor:
    return torch.exp2(torch.log2(scale) + (torch.log2(scale).round() - torch.log2(scale)).detach())


def learned_bits_surrogate(x: Tensor, reach: Tensor, bits: Tensor) -> Tensor:
    step = reach / (2 ** (bits + (bits.round() - bits).detach() - 1) - 1)
    v = x / step
    return torch.where(x.abs() <= reach, x + step * (v.round() - v).detach(), reach * torch.sign(x))


@dataclass(frozen=True)
class Rule:
    """A rule with the inputs it is tried on, the function whose derivatives it claims, and NumPy's forward."""

    function: Callable[..., Tensor]
    surrogate: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    forward: Callable[..., Array] | None = None


VALUES = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
PER_ROW = double(1.3, 2.0, 0.7, 2.9).reshape(4, 1)

RULES = {
    "pact": Rule(lambda x, a: pact_quantize(x, a, 3), pact_surrogate, (VALUES, scalar(1.9)), pact_numpy),
    "pact, rows": Rule(lambda x, a: pact_quantize(x, a, 3), pact_surrogate, (VALUES, PER_ROW), pact_numpy),
    "dorefa weight": Rule(lambda w: dorefa_quantize_weight(w, 3, 0), dorefa_surrogate, (VALUES,), dorefa_numpy),
    "dorefa weight, ties": Rule(
        lambda w: dorefa_quantize_weight(w, 3, 0), dorefa_surrogate, (double(-1.0, 1.0, 0.5, 1.0).reshape(1, 4),)
    ),
    "dorefa one bit": Rule(
        lambda w: dorefa_quantize_weight(w, 1, 0),
        lambda w: w + (torch.sign(w) * w.abs().mean(1, keepdim=True) - w).detach(),
        (VALUES,),
        lambda w: np.sign(w) * np.abs(w).mean(axis=1, keepdims=True),
    ),
    "dorefa activation": Rule(
        lambda x: dorefa_quantize_activation(x, 3),
        lambda x: torch.where(x < 0, 0, torch.where(x > 1, 1, x)),
        (VALUES,),
        lambda x: np.round(np.clip(x, 0, 1) * 7) / 7,
    ),
    "apot": Rule(lambda x, a: apot_quantize(x, a, 4), apot_surrogate, (VALUES, scalar(1.9)), apot_numpy),
    "apot, rows": Rule(lambda x, a: apot_quantize(x, a, 4), apot_surrogate, (VALUES, PER_ROW), apot_numpy),
    "normalize": Rule(
        lambda w: normalize_weight(w, 0),
        lambda w: (w - w.mean(1, keepdim=True).detach()) / w.std(1, keepdim=True, correction=0).detach(),
        (VALUES,),
        lambda w: (w - w.mean(1, keepdims=True)) / w.std(1, keepdims=True),
    ),
    "power of two": Rule(
        power_of_two_scale, power_of_two_surrogate, (VALUES.abs(),), lambda s: 2 ** np.round(np.log2(s))
    ),
    "power of two, up": Rule(
        lambda s: power_of_two_scale(s, "up"),
        lambda s: s * (2 ** torch.ceil(torch.log2(s)) / s).detach(),
        (VALUES.abs(),),
        lambda s: 2 ** np.ceil(np.log2(s)),
    ),
    "learned bits": Rule(
        learned_bits_quantize, learned_bits_surrogate, (VALUES, scalar(1.9), scalar(3.3)), learned_bits_numpy
    ),
    "learned bits, rows": Rule(
        learned_bits_quantize, learned_bits_surrogate, (VALUES, PER_ROW, PER_ROW + 1.7), learned_bits_numpy
    ),
}

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def derivatives(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of every input, then those of a scalar made of these, for every input and the incoming gradient."""
    leaves = [leaf(value) for value in inputs]
    y = function(*leaves)
    grad = leaf(uneven(y))
    first = torch.autograd.grad(y, leaves, grad, create_graph=True)
    mixed = sum((value * uneven(value).flip(0) if value.ndim else value).square().sum() for value in first)
    second = torch.autograd.grad(mixed, [grad, *leaves], materialize_grads=True)
    return [*(value.detach() for value in first), *second]


def assert_equal_all(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# The row of ties at DoReFa's maximum is there for its gradient; the forward is compared on other values.
WITH_REFERENCE = {name: rule for name, rule in RULES.items() if rule.forward is not None}


@pytest.mark.parametrize("rule", WITH_REFERENCE.values(), ids=WITH_REFERENCE.keys())
def test_forward_equals_numpy(rule):
    expected = rule.forward(*(value.numpy() for value in rule.inputs))
    np.testing.assert_allclose(rule.function(*rule.inputs), expected, rtol=1e-13, atol=1e-15)


@every_rule
def test_first_and_second_derivatives_are_the_surrogates(rule):
    assert_equal_all(derivatives(rule.function, rule.inputs), derivatives(rule.surrogate, rule.inputs))


@every_rule
def test_func_grad_vmap_and_jvp(rule):
    def loss(function):
        return lambda *values: (function(*values) * uneven(rule.inputs[0])).sum()

    slots = tuple(range(len(rule.inputs)))
    expected = torch.func.grad(loss(rule.surrogate), slots)(*rule.inputs)
    assert_equal_all(list(torch.func.grad(loss(rule.function), slots)(*rule.inputs)), list(expected))

    tangents = tuple(uneven(value) for value in rule.inputs)
    _, tangent = torch.func.jvp(rule.function, rule.inputs, tangents)
    torch.testing.assert_close(tangent, torch.func.jvp(rule.surrogate, rule.inputs, tangents)[1])
    forward_over_reverse = torch.func.jvp(torch.func.grad(loss(rule.function)), rule.inputs, tangents)[1]
    expected = torch.func.jvp(torch.func.grad(loss(rule.surrogate)), rule.inputs, tangents)[1]
    torch.testing.assert_close(forward_over_reverse, expected)

    batches = tuple(torch.stack([value, value * 1.25, value * 0.75], dim=value.ndim) for value in rule.inputs)
    last = tuple(value.ndim for value in rule.inputs)  # the batch is the last axis: nothing may count on the first
    y = torch.func.vmap(rule.function, in_dims=last)(*batches)
    singles = [tuple(value.select(-1, i) for value in batches) for i in range(3)]
    torch.testing.assert_close(y, torch.stack([rule.function(*single) for single in singles]))
    per_sample = torch.func.vmap(torch.func.grad(loss(rule.function), slots), in_dims=last)(*batches)
    each = [torch.func.grad(loss(rule.function), slots)(*single) for single in singles]
    assert_equal_all(list(per_sample), [torch.stack(values) for values in zip(*each, strict=True)])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11's compiler's own
@every_rule
def test_compiles_in_one_graph_with_the_same_gradients(rule):
    torch.compiler.reset()
    compiled = torch.compile(rule.function, fullgraph=True, backend="aot_eager")
    ours, eager = [leaf(value) for value in rule.inputs], [leaf(value) for value in rule.inputs]
    y, expected = compiled(*ours), rule.function(*eager)
    assert torch.equal(y, expected)
    y.backward(uneven(y))
    expected.backward(uneven(y))
    assert_equal_all([value.grad for value in ours], [value.grad for value in eager])
    assert any(value.grad.abs().sum() > 0 for value in ours)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_computed_in_float32_and_kept(rule, dtype):
    """Parameters stay in float32, as in mixed-precision training; every gradient has the type of its input."""
    narrow = [leaf(rule.inputs[0], dtype), *(leaf(value, torch.float32) for value in rule.inputs[1:])]
    wide = [leaf(value.detach().float(), torch.float32) for value in narrow]
    y, expected = rule.function(*narrow), rule.function(*wide)
    assert torch.equal(y, expected.detach().to(dtype))
    y.backward(uneven(y))
    expected.backward(uneven(y).float())
    for one, other in zip(narrow, wide, strict=True):
        assert one.grad.dtype == one.dtype
        torch.testing.assert_close(
            one.grad, other.grad.to(one.dtype), rtol=1e-2 if dtype != torch.float32 else 1e-6, atol=1e-6
        )


@every_rule
def test_meta_empty_and_strided_tensors(rule):
    meta = [value.to("meta").requires_grad_() for value in rule.inputs]
    y = rule.function(*meta)
    y.backward(torch.ones_like(y))
    assert (y.device.type, y.shape) == ("meta", rule.inputs[0].shape)
    assert [value.grad.shape for value in meta] == [value.shape for value in rule.inputs]

    for empty in (VALUES[:0], VALUES[:, :0]):
        parameters = [value[: len(empty)] if value.ndim else value for value in rule.inputs[1:]]
        leaves = [leaf(empty), *(leaf(value) for value in parameters)]
        y = rule.function(*leaves)
        y.sum().backward()
        assert y.shape == leaves[0].grad.shape == empty.shape
        assert all(value.grad.eq(0).all() for value in leaves[1:])

    strided = [value.t().contiguous().t() if value.ndim == 2 else value for value in rule.inputs]
    assert_equal_all(derivatives(rule.function, strided), derivatives(rule.function, rule.inputs))


@every_rule
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nan_stays_and_what_is_not_finite_spoils_no_neighbour(rule, value):
    """Rows are channels: a weight's statistic may carry a NaN along its own row, never to another one."""
    x = rule.inputs[0].clone()
    x[0, 0] = abs(value) if rule.inputs[0].min() > 0 else value
    y = rule.function(x, *rule.inputs[1:])
    assert y[0, 0].isnan() == math.isnan(value) or rule.function(torch.full((1, 1), value).double()).isnan().all()
    clean = rule.function(*rule.inputs)
    assert torch.equal(y[1:], clean[1:])
    if len(rule.inputs) == 1:
        ours, expected = derivatives(rule.function, (x,)), derivatives(rule.function, rule.inputs)
        assert_equal_all([one[1:] for one in ours], [one[1:] for one in expected])
        return
    ours, expected = derivatives(rule.function, (x, *rule.inputs[1:])), derivatives(rule.function, rule.inputs)
    assert_equal_all([ours[0].flatten()[1:]], [expected[0].flatten()[1:]])
    if not math.isnan(value):
        assert all(one.isfinite().all() for one in ours)
