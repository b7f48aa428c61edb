"""The straight-through Functions: forward and every gradient against the NumPy reference, edges and dtypes."""

import warnings

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat.functional import fake_quantize, lsq_plus_quantize, lsq_quantize, positive_scale, round_ste

# v = x / scale around the bounds of int4 and on ties of both parities: outside by a quarter, a half, and far.
INT4_V = (-20.0, -8.75, -8.5, -8.25, -8.0, -7.75, -7.5, -2.5, -1.5, -0.5, -0.25, 0.0)
INT4_V += (0.25, 0.5, 1.5, 2.5, 6.5, 6.75, 7.0, 7.25, 7.5, 7.75, 20.0, 3.3)

FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
finite = st.floats(-1e4, 1e4, allow_nan=False, width=32)
tensors = st.lists(finite, min_size=1, max_size=20).map(lambda values: torch.tensor(values, dtype=torch.float64))
steps = st.floats(1e-3, 1e3)


def leaf(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).clone().requires_grad_()


def numbers(x: Tensor) -> reference.Array:
    return x.detach().double().numpy()


def cotangent(x: Tensor) -> Tensor:
    """An uneven gradient of the output, so that sums over wrong axes show."""
    return torch.linspace(0.5, 2.0, x.numel(), dtype=x.dtype).reshape(x.shape)


SCALES = {
    "per tensor ()": ((), 0.25),
    "per tensor (1,)": ((1,), 0.25),
    "per channel, axis 0": ((2, 1, 1), (0.25, 2.0)),
    "per channel, axis 1": ((1, 4, 1), (0.25, 0.5, 2.0, 0.1)),
    "per channel, axis -1 without leading ones": ((6,), (0.25, 0.5, 2.0, 0.1, 1.0, 0.3)),
}


@pytest.mark.parametrize("grad_factor", [1.0, 0.03])
@pytest.mark.parametrize(("shape", "scale"), SCALES.values(), ids=SCALES.keys())
def test_lsq_forward_and_gradients_equal_the_formula(shape, scale, grad_factor):
    step = leaf(np.reshape(scale, shape))
    v = torch.tensor(INT4_V * 2, dtype=torch.float64).reshape(2, 4, 6)
    x = leaf(v * step.detach())
    y = lsq_quantize(x, step, -8, 7, grad_factor)
    grad = cotangent(y)
    y.backward(grad)
    np.testing.assert_array_equal(numbers(y), reference.lsq(numbers(x), numbers(step), -8, 7))
    grad_x, grad_step = reference.lsq_gradients(numbers(x), numbers(step), -8, 7, numbers(grad), grad_factor)
    np.testing.assert_array_equal(numbers(x.grad), grad_x)
    assert step.grad.shape == step.shape
    np.testing.assert_allclose(numbers(step.grad), grad_step, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero_point", [-5.0, -4.4, 0.0, 2.5, 3.0, 3.5, 6.0, 40.0, -40.0])
@pytest.mark.parametrize(("shape", "scale"), SCALES.values(), ids=SCALES.keys())
def test_lsq_plus_forward_and_gradients_equal_the_formula(shape, scale, zero_point):
    step = leaf(np.reshape(scale, shape))
    zero = leaf(np.full(shape, zero_point) + np.arange(step.numel()).reshape(shape))
    acting = torch.as_tensor(reference.integer_zero(numbers(zero), -8, 7))
    v = torch.tensor(INT4_V * 2, dtype=torch.float64).reshape(2, 4, 6) - acting
    x = leaf(v * step.detach())
    y = lsq_plus_quantize(x, step, zero, -8, 7, 0.5)
    grad = cotangent(y)
    y.backward(grad)
    arguments = (numbers(x), numbers(step), numbers(zero), -8, 7)
    np.testing.assert_allclose(numbers(y), reference.lsq_plus(*arguments), rtol=1e-14, atol=1e-15)
    grad_x, grad_step, grad_zero = reference.lsq_plus_gradients(*arguments, numbers(grad), 0.5)
    np.testing.assert_array_equal(numbers(x.grad), grad_x)
    assert step.grad.shape == step.shape and zero.grad.shape == zero.shape
    np.testing.assert_allclose(numbers(step.grad), grad_step, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(numbers(zero.grad), grad_zero, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("v", "code", "grad_x", "slope"),
    [
        (-8.0, -8, 1.0, 0.0),  # on the lower bound: inside
        (-8.25, -8, 0.0, -8.0),
        (7.0, 7, 1.0, 0.0),  # on the upper bound: inside
        (7.25, 7, 0.0, 7.0),  # rounds to the bound, but unrounded it is outside
        (0.5, 0, 1.0, -0.5),  # ties go to the even neighbour
        (1.5, 2, 1.0, 0.5),
        (-2.5, -2, 1.0, 0.5),
        (-0.5, 0, 1.0, 0.5),
        (float("inf"), 7, 0.0, 7.0),
        (float("-inf"), -8, 0.0, -8.0),
    ],
)
def test_lsq_at_the_edges_by_hand(v, code, grad_x, slope):
    x, step = leaf([v * 0.5]), leaf(0.5)
    y = lsq_quantize(x, step, -8, 7)
    y.sum().backward()
    assert (y.item(), x.grad.item(), step.grad.item()) == (code * 0.5, grad_x, slope)


def test_the_mask_differs_from_torch_on_half_a_step_as_documented():
    x = leaf([7.25, 7.75, -8.25], torch.float32)
    torch.fake_quantize_per_tensor_affine(x, 1.0, 0, -8, 7).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 1.0]
    ours = leaf([7.25, 7.75, -8.25], torch.float32)
    fake_quantize(ours, torch.tensor(1.0), torch.tensor(0), -8, 7).sum().backward()
    assert ours.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("qmin", "qmax", "zero_point"), [(0, 255, 128), (-128, 127, -6), (-128, 127, 0), (0, 15, 4)])
def test_forward_equals_torchs_own_fake_quantize(qmin, qmax, zero_point):
    """Steps are powers of two and zero points even: torch multiplies by 1/scale and rounds after adding."""
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * (qmax - qmin) / 12
    x = torch.cat([x, torch.arange(-6, 6).repeat(3, 1) / 8], dim=1)
    oracle = torch.fake_quantize_per_tensor_affine(x, 0.25, zero_point, qmin, qmax)
    zero = torch.tensor(float(zero_point))
    assert torch.equal(fake_quantize(x, torch.tensor(0.25), zero, qmin, qmax), oracle)
    scales, zeros = torch.tensor([0.25, 0.5, 2.0]), torch.tensor([zero_point, zero_point + 2, zero_point])
    oracle = torch.fake_quantize_per_channel_affine(x, scales, zeros.int(), 0, qmin, qmax)
    assert torch.equal(fake_quantize(x, scales[:, None], zeros[:, None], qmin, qmax), oracle)
    if zero_point == 0:
        oracle = torch.fake_quantize_per_tensor_affine(x, 0.25, 0, qmin, qmax)
        assert torch.equal(lsq_quantize(x, torch.tensor(0.25), qmin, qmax), oracle)


def test_ties_follow_onnx_with_an_odd_zero_point_too():
    """QuantizeLinear rounds x / scale before it adds the zero point: 0.5 goes to 0 whatever the zero point."""
    x = torch.tensor([0.5, 1.5, -0.5, 2.5])
    for zero_point in (2.0, 3.0, -3.0):
        y = lsq_plus_quantize(x, torch.tensor(1.0), torch.tensor(zero_point), -8, 7)
        assert y.tolist() == [0.0, 2.0, 0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_computed_in_float32_and_kept(dtype):
    x = leaf(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), dtype)
    step = leaf(0.0237, torch.float32)
    y = lsq_quantize(x, step, -128, 127)
    assert y.dtype == dtype
    exact = lsq_quantize(x.detach().float(), step.detach(), -128, 127)
    assert torch.equal(y, exact.to(dtype))
    if dtype == torch.bfloat16:  # the same formula in bfloat16 arithmetic puts many values on other levels
        naive = torch.clamp(torch.round(x.detach() / step.detach().to(dtype)), -128, 127)
        assert (naive.float() != exact / step.detach()).float().mean() > 0.02
    y.backward(torch.ones_like(y))
    assert (x.grad.dtype, step.grad.dtype) == (dtype, torch.float32)
    grad_x, grad_step = reference.lsq_gradients(numbers(x), numbers(step), -128, 127, np.ones((64, 64)))
    np.testing.assert_array_equal(numbers(x.grad), grad_x)
    assert step.grad.item() == pytest.approx(grad_step.item(), abs=0.02)
    affine = lsq_plus_quantize(x.detach(), step.detach(), torch.tensor(-7.0), -128, 127)
    assert affine.dtype == dtype
    expected = reference.lsq_plus(numbers(x), numbers(step), np.float64(-7), -128, 127)
    np.testing.assert_allclose(numbers(affine), expected, rtol=torch.finfo(dtype).eps)


def test_only_the_gradients_asked_for_are_computed():
    x, step, zero = leaf([0.3, 9.0]), leaf(0.5), leaf(1.0)
    for quantize, parts in ((lsq_quantize, (x, step)), (lsq_plus_quantize, (x, step, zero))):
        for wanted in range(1, 2 ** len(parts)):
            arguments = [part if wanted >> i & 1 else part.detach() for i, part in enumerate(parts)]
            y = quantize(*arguments, -8, 7)
            given_back = [part is not None for part in y.grad_fn.apply(torch.ones_like(y))]
            assert given_back == [part.requires_grad for part in arguments] + [False] * 3
    fake_quantize(x, step, zero, -8, 7).sum().backward()
    assert x.grad is not None and step.grad is None and zero.grad is None


def test_double_backward_is_linear_in_the_output_gradient():
    x, step, grad = leaf([0.3, 9.0, -1.1]), leaf(0.5), leaf([1.0, 2.0, 3.0])
    y = lsq_quantize(x, step, -8, 7)
    grad_x, grad_step = torch.autograd.grad(y, (x, step), grad, create_graph=True)
    through_x, through_step = (torch.autograd.grad(g.sum(), grad, retain_graph=True)[0] for g in (grad_x, grad_step))
    assert through_x.tolist() == [1.0, 0.0, 1.0]
    assert through_step.tolist() == pytest.approx([0.4, 7.0, 0.2])


def test_nan_in_gives_nan_out_and_spares_its_neighbours():
    nan, one = float("nan"), torch.tensor(1.0)
    x = torch.tensor([0.4, nan, 9.0])
    for y in (lsq_quantize(x, one, -8, 7), lsq_plus_quantize(x, one, one, -8, 7), fake_quantize(x, one, one, -8, 7)):
        assert y.isnan().tolist() == [False, True, False]
    assert round_ste(x).isnan().tolist() == [False, True, False]
    assert lsq_quantize(torch.ones(2), torch.tensor(nan), -8, 7).isnan().all()
    assert lsq_plus_quantize(torch.ones(2), one, torch.tensor(nan), -8, 7).isnan().all()
    step = leaf(1.0, torch.float32)
    lsq_quantize(x, step, -8, 7).sum().backward()
    assert step.grad.isnan()


@pytest.mark.parametrize("shape", [(), (1, 3)])
def test_empty_tensors(shape):
    x, step = leaf(torch.empty(0, 3)), leaf(torch.ones(shape))
    for y in (lsq_quantize(x, step, -8, 7), lsq_plus_quantize(x, step, torch.zeros(shape), -8, 7)):
        assert y.shape == (0, 3)
        step.grad = None
        y.sum().backward()
        assert x.grad.shape == (0, 3) and torch.equal(step.grad, torch.zeros(shape, dtype=torch.float64))


ONE = torch.tensor(1.0)
CALLS = {
    "round_ste": lambda x, low, high: round_ste(x),
    "lsq_quantize": lambda x, low, high: lsq_quantize(x, ONE, low, high),
    "lsq_plus_quantize": lambda x, low, high: lsq_plus_quantize(x, ONE, ONE, low, high),
    "fake_quantize": lambda x, low, high: fake_quantize(x, ONE, ONE, low, high),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_integers_are_refused(name, dtype):
    with pytest.raises(TypeError) as refusal:
        CALLS[name](torch.ones(2, dtype=dtype), -8, 7)
    assert str(refusal.value) == f"{name}: x must be a floating-point tensor, got {dtype}"


@pytest.mark.parametrize("name", [name for name in CALLS if name != "round_ste"])
@pytest.mark.parametrize(("qmin", "qmax"), [(7, 7), (8, -8)])
def test_empty_grids_are_refused(name, qmin, qmax):
    with pytest.raises(ValueError) as refusal:
        CALLS[name](torch.ones(2), qmin, qmax)
    assert str(refusal.value) == f"{name}: qmin must be below qmax, got qmin={qmin} and qmax={qmax}"


def test_torch_compile_takes_the_whole_graph():
    def both(x: Tensor, step: Tensor, zero: Tensor) -> Tensor:
        return lsq_quantize(x, step, -8, 7, 0.5) + lsq_plus_quantize(x, step, zero, 0, 15, 0.5) + round_ste(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, which differ between torch versions
        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        outcomes = []
        for function in (both, compiled):
            arguments = leaf(torch.linspace(-9, 9, 15).reshape(5, 3)), leaf([[0.3, 0.5, 2.0]]), leaf([[3.0, 4.0, 0.0]])
            y = function(*arguments)
            y.backward(cotangent(y))
            outcomes.append([y.detach(), *(part.grad for part in arguments)])
    for eager, traced in zip(*outcomes, strict=True):
        torch.testing.assert_close(traced, eager)


def test_torch_func_grad_and_vmap_equal_a_loop():
    x = torch.linspace(-9, 9, 12, dtype=torch.float64).reshape(3, 4)
    scales = torch.tensor([0.3, 0.5, 2.0], dtype=torch.float64)

    def loss(x: Tensor, scale: Tensor) -> Tensor:
        y = lsq_quantize(x, scale, -8, 7, 0.1) + lsq_plus_quantize(x, scale, torch.tensor(3.0), 0, 15, 0.1)
        return (y * torch.arange(1.0, 5.0)).sum()

    derivative = torch.func.grad(loss, argnums=(0, 1))
    for in_dims, own_scale in (((0, 0), True), ((0, None), False)):
        at_once = torch.func.vmap(derivative, in_dims=in_dims)(x, scales if own_scale else scales[1])
        one_by_one = [derivative(row, scales[i] if own_scale else scales[1]) for i, row in enumerate(x)]
        for slot in (0, 1):
            torch.testing.assert_close(at_once[slot], torch.stack([each[slot] for each in one_by_one]))


def test_meta_tensors_give_shapes_forward_and_backward():
    x = torch.empty(2, 3, 4, device="meta", dtype=torch.bfloat16, requires_grad=True)
    step = torch.ones(3, 1, device="meta", requires_grad=True)
    y = lsq_quantize(x, step, -8, 7) + lsq_plus_quantize(x, step, torch.zeros(3, 1, device="meta"), -8, 7)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")
    y.sum().backward()
    assert (x.grad.shape, x.grad.dtype, step.grad.shape) == (x.shape, x.dtype, step.shape)


def test_memory_layout_changes_no_value_and_channels_last_is_kept():
    dense = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grad, step = cotangent(dense), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64).reshape(1, 3, 1, 1)
    outcomes = []
    last = torch.channels_last
    spread = torch.empty(2, 3, 4, 10, dtype=torch.float64)[..., ::2].copy_(dense)
    for x in (dense.clone(), dense.clone(memory_format=last), spread):
        x, own_step = x.detach().requires_grad_(), leaf(step)
        y = lsq_quantize(x, own_step, -8, 7)
        assert y.is_contiguous(memory_format=last) == x.is_contiguous(memory_format=last)
        y.backward(grad)
        outcomes.append((y, x.grad, own_step.grad))
    assert not spread.is_contiguous()
    for outcome in outcomes[1:]:
        assert torch.equal(outcome[0], outcomes[0][0]) and torch.equal(outcome[1], outcomes[0][1])
        torch.testing.assert_close(outcome[2], outcomes[0][2])


@FEW
@given(tensors, steps, st.integers(2, 8), st.integers(-200, 200))
def test_outputs_are_few_levels_ordered_stable_and_hold_zero(x, step, bits, zero):
    qmin, qmax = reference.bounds(bits, signed=True)
    scale, zero_point = torch.tensor(step, dtype=torch.float64), torch.tensor(float(zero))
    x = torch.cat([x.sort().values, torch.zeros(1, dtype=torch.float64)])
    for quantize in (
        lambda x: lsq_quantize(x, scale, qmin, qmax),
        lambda x: lsq_plus_quantize(x, scale, zero_point, qmin, qmax),
    ):
        y = quantize(x)
        assert torch.equal(quantize(y), y)
        assert (y[:-1].diff() >= 0).all()
        assert len(y.unique()) <= 2**bits and len(quantize(scale * torch.arange(-600, 600)).unique()) == 2**bits
        assert y[-1] == 0


@FEW
@given(tensors, steps)
def test_the_gradient_is_zero_outside_and_one_inside(x, step):
    scale = torch.tensor(step, dtype=torch.float64)
    x = leaf(torch.cat([x, 4 * x]))
    lsq_quantize(x, scale, -8, 7).sum().backward()
    v = numbers(x) / step
    np.testing.assert_array_equal(numbers(x.grad), ((v >= -8) & (v <= 7)).astype(float))


def test_round_ste_rounds_half_to_even_and_passes_the_gradient():
    x = leaf([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 7.0])
    y = round_ste(x)
    y.backward(torch.arange(7.0, dtype=torch.float64))
    assert y.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 0.0, 7.0]
    assert x.grad.tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_positive_scale_is_positive_and_finite_and_learns_back(dtype):
    nan, inf = float("nan"), float("inf")
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


def test_positive_scale_acts_as_its_floor_at_least():
    raw, floor = leaf([0.5, 0.1, -7.0]), torch.tensor([0.25, 0.25, 0.125], dtype=torch.float64)
    scale = positive_scale(raw, floor)
    assert scale.tolist() == [0.5, 0.25, 0.125]
    scale.backward(torch.ones(3, dtype=torch.float64))
    assert raw.grad.tolist() == [1.0, 0.0, 0.0]
