"""Every operator, in C and by formula, against the same computation in float64; where nothing rounds, to the bit."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qat.codes.operators.curves import CURVE_NUMBERS
from tests.references.cases_fused import two_threads
from tests.references.cases_kernels import (
    FORMULA,
    GRIDS,
    LAYOUTS,
    NO_CLIP,
    Quantized,
    draw,
    draw_codes,
    grid,
    near,
    ops,
    same,
)

__all__ = ["ops", "two_threads"]  # fixtures

CLIPS = [NO_CLIP, [0.0, math.inf], [-0.5, 1.0]]


# ---- a tensor, and a sum ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GRIDS)
def test_a_tensor(name: str, layout: str, ops: Any) -> None:
    given, x, grad = GRIDS[name], LAYOUTS[layout](draw(4, 8, 9, 51)), LAYOUTS[layout](draw(4, 8, 9, 51, seed=1))
    expected = Quantized(x, given)
    expected.check_codes(*ops.quantize_codes(x, *given), x)
    for needs, gradient in itertools.product((True, False), (grad, grad.contiguous(), grad[:1].expand_as(grad))):
        grad_x, grad_scale = ops.quantize_codes_backward(gradient, x, *given, needs)
        if needs:
            same(grad_x, torch.empty_like(x).copy_(torch.where(expected.inside, gradient, 0.0)))
        else:
            assert not grad_x.numel()
        expected.check_scale(grad_scale, gradient)


@pytest.mark.parametrize("name", GRIDS)
def test_ties_bounds_nan_and_infinity(name: str, ops: Any) -> None:
    given = GRIDS[name]
    step = Quantized(torch.zeros(1), given).step
    x = torch.cat([step * (torch.arange(-600, 600) / 2), torch.tensor([math.inf, -math.inf, 3e38, -3e38])])
    expected = Quantized(x, given)
    expected.check_codes(*ops.quantize_codes(x, *given), x)
    x[700] = math.nan
    codes, qparams = ops.quantize_codes(x, *given)
    kept = torch.arange(len(x)) != 700
    assert torch.equal(codes[kept].double(), expected.codes[kept])
    assert qparams.isnan().tolist() == [True, False] and qparams[1] == expected.qparams[1]
    grad_x, grad_scale = ops.quantize_codes_backward(torch.ones_like(x), x, *given, True)
    assert torch.equal(grad_x[kept], expected.inside[kept].float()) and grad_x[700] == 0 and grad_scale.isnan()


def test_scales_with_axes(ops: Any) -> None:
    tensors, levels = GRIDS["affine"]
    given = [each if each is None else each.reshape(1) for each in tensors]
    x = torch.tensor(0.7)
    assert ops.quantize_codes(x, given, levels)[0].shape == ()
    assert ops.quantize_codes_backward(x, x, given, levels, True)[1].shape == (1,)


@pytest.mark.parametrize("steps", [(0.0123, 0.0057), (0.5, 0.25)])  # with the latter, sums lie on the bounds
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sum(layout: str, clip: list[float], steps: tuple[float, float], ops: Any) -> None:
    a, b = (LAYOUTS[layout](draw_codes(6, 8, 9, 11, seed=seed)) for seed in (0, 1))
    grad = LAYOUTS[layout](draw(6, 8, 9, 11))
    qparams = torch.tensor([steps[0], 128.0]), torch.tensor([steps[1], 17.0])
    values = [(each.float() - pair[1]) * pair[0] for each, pair in ((a, qparams[0]), (b, qparams[1]))]
    same(ops.dequantize(a, qparams[0]), values[0])
    z = values[0] + values[1]
    for given in GRIDS.values():
        expected = Quantized(z.clamp(*clip), given)
        expected.check_codes(*ops.add_quantize(a, b, *qparams, clip, *given), a)
        grad_sum, grad_scale = ops.add_quantize_backward(grad, a, b, *qparams, clip, *given)
        same(grad_sum, torch.where(expected.inside & (z > clip[0]) & (z < clip[1]), grad, 0.0))
        expected.check_scale(grad_scale, grad)
    spoilt = torch.tensor([math.nan, 17.0])
    assert ops.add_quantize(a, b, qparams[0], spoilt, clip, *given)[1][0].isnan()


# ---- a norm ----

VOLUMES = {
    "rows": lambda: draw(700, 12),
    "sequences": lambda: draw(9, 80, 12),
    "images": lambda: draw(6, 12, 11, 13),
    "channels_last": lambda: draw(6, 12, 11, 13).to(memory_format=torch.channels_last),
    "volumes": lambda: draw(3, 12, 5, 7, 9),
    "volumes, channels last": lambda: draw(3, 12, 5, 7, 9).to(memory_format=torch.channels_last_3d),
}


def across(y: Tensor) -> list[int]:
    """The axes besides that of the channels."""
    return [0, *range(2, y.dim())] if y.dim() > 3 else [*range(y.dim() - 1)]


def along(values: Tensor, y: Tensor) -> Tensor:
    return values.double().reshape(-1, *[1] * (y.dim() - 2)) if y.dim() > 3 else values.double()


@pytest.mark.parametrize("kind", VOLUMES)
def test_statistics(kind: str, ops: Any) -> None:
    y = VOLUMES[kind]() * 3 + 100
    mean, inverse, variance = ops.batch_statistics(y, 1e-5)
    exact = y.double().var(across(y), correction=0)
    assert torch.allclose(mean.double(), y.double().mean(across(y)), rtol=1e-6)
    assert torch.allclose(inverse.double(), (exact + 1e-5).rsqrt(), rtol=1e-5)
    assert torch.allclose(variance.double(), y.double().var(across(y)), rtol=1e-5)


def test_statistics_of_one_value(ops: Any) -> None:
    y = draw(1, 12)
    mean, inverse, variance = ops.batch_statistics(y, 0.25)
    assert torch.equal(mean, y[0]) and inverse.eq(2).all() and variance.eq(0).all()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", VOLUMES)
def test_a_norm(kind: str, clip: list[float], ops: Any) -> None:
    y = VOLUMES[kind]() * 3
    grad, axes = draw(*y.shape, seed=4), across(y)
    n = y.shape[1] if y.dim() > 3 else y.shape[-1]
    mean, inverse, _ = FORMULA.batch_statistics(y, 1e-5)
    norm = [1 + 0.1 * draw(n, seed=1), 0.3 * draw(n, seed=2), mean, inverse]
    gamma, beta, centre, spread = (along(each, y) for each in norm)
    z = (y.double() - centre) * spread * gamma + beta
    g = grad.double()
    for given in GRIDS.values():
        expected = Quantized(z.clamp(*clip), given)
        expected.check_codes(*ops.norm_quantize(y, norm, clip, *given), y)
        unsure = expected.unsure | ((z - clip[0]).abs() < 1e-5) | ((z - clip[1]).abs() < 1e-5)
        masked = torch.where(expected.inside & (z > clip[0]) & (z < clip[1]), g, 0.0)
        products = masked * (y.double() - centre)
        loose = (g.abs() * unsure).sum(axes)
        for follows, needs in ((True, True), (False, True), (True, False)):
            grad_y, grad_gamma, grad_beta, grad_scale = ops.norm_quantize_backward(
                grad, y, norm, clip, *given, follows, needs
            )
            near(grad_beta, masked.sum(axes), 1e-5 * g.abs().sum(axes) + loose)
            near(grad_gamma, products.sum(axes) * inverse, 3e-5 * g.abs().sum(axes) + 10 * loose)
            expected.check_scale(grad_scale, grad)
            if not needs:
                assert not grad_y.numel()
                continue
            back = masked
            if follows:
                back = masked - along(masked.mean(axes), y) - (y.double() - centre) * along(
                    products.mean(axes) * inverse**2, y
                )  # fmt: skip
            assert grad_y.stride() == y.stride()
            atol = 1e-5 + float(loose.max()) / 50
            close = torch.isclose(grad_y.double(), back * gamma * spread, rtol=1e-4, atol=atol)
            assert bool((close | unsure).all())
    spoilt = y.clone()
    spoilt[0, 0] = math.nan
    assert ops.norm_quantize(spoilt, norm, clip, *given)[1].isnan().tolist() == [True, False]


# ---- curves and softmax ----


def _phi(x: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-x / math.sqrt(2))


def _tanh_inner(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


CURVES = {
    "gelu": lambda x: x * _phi(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(_tanh_inner(x))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
}
"""In float64; autograd has the slopes."""


@pytest.mark.parametrize("shape", [(7,), (41, 501)])
@pytest.mark.parametrize("curve", CURVE_NUMBERS)
def test_curves(curve: str, shape: tuple[int, ...], ops: Any) -> None:
    x, grad = draw(*shape) * 3, draw(*shape, seed=1)
    wide = x.double().requires_grad_()
    value = CURVES[curve](wide)
    (rise,) = torch.autograd.grad(value.sum(), wide)
    for given in GRIDS.values():
        expected = Quantized(value.detach(), given)
        expected.check_codes(*ops.curve_quantize(x, curve, *given), x)
        grad_x, grad_scale = ops.curve_quantize_backward(grad, x, curve, *given)
        exact = grad.double() * expected.inside * rise
        assert bool((torch.isclose(grad_x.double(), exact, rtol=1e-5, atol=2e-6) | expected.unsure).all())
        expected.check_scale(grad_scale, grad)


@pytest.mark.parametrize("curve", CURVE_NUMBERS)
def test_curves_far_out(curve: str, ops: Any) -> None:
    x, given = torch.tensor([-3e38, -1e4, -100.0, -13.0, 0.0, 100.0, 1e4, 3e38]), grid(1.0, 3.0, factor=1.0)
    codes, qparams = ops.curve_quantize(x, curve, *given)
    assert codes.tolist() == [3, 3, 3, 3, 3, 103, 255, 255] and qparams.tolist() == [1.0, 3.0]
    grad_x, _ = ops.curve_quantize_backward(torch.ones(8), x, curve, *given)
    assert grad_x[:3].abs().max() < 1e-30 and grad_x[3:].tolist()[1:] == [0.5, 1.0, 0.0, 0.0]
    x[2] = math.nan
    assert ops.curve_quantize(x, curve, *given)[1].isnan().tolist() == [True, False]
    assert ops.curve_quantize_backward(torch.ones(8), x, curve, *given)[1].isnan()


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 40, 97)])
@pytest.mark.parametrize("multiplier", [1.0, 0.125, -2.0])
def test_softmax(shape: tuple[int, ...], multiplier: float, ops: Any) -> None:
    x, grad = draw(*shape) * 3, draw(*shape[:-2], shape[-1], shape[-2], seed=1).mT
    p = torch.softmax(x.double() * multiplier, -1)
    for given in (grid(0.5 / 255, smallest=1e-9), grid(0.5 / 255, smallest=1e-9, relative=True, factor=0.5)):
        expected = Quantized(p, given)
        probabilities, codes, qparams = ops.softmax_quantize(x, multiplier, *given)
        assert torch.allclose(probabilities.double(), p, rtol=2e-6, atol=1e-12)
        expected.check_codes(codes, qparams, x)
        grad_x, grad_scale = ops.softmax_quantize_backward(grad, probabilities, multiplier, *given)
        passed = grad.double() * expected.inside
        exact = multiplier * p * (passed - (passed * p).sum(-1, keepdim=True))
        assert grad_x.stride() == x.stride() and torch.allclose(grad_x.double(), exact, rtol=1e-4, atol=1e-6)
        expected.check_scale(grad_scale, grad)


def test_masked_scores(ops: Any) -> None:
    """Those at -inf have probability 0 exactly; a row of nothing else is NaN, and found."""
    x, given = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, 1.0, -math.inf]]), grid(1 / 255, smallest=1e-9)
    probabilities, codes, qparams = ops.softmax_quantize(x, 0.3, *given)
    assert probabilities.tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]] and codes[1].tolist() == [0, 255, 0]
    assert not qparams.isnan().any()
    x[0] = -math.inf
    probabilities, _, qparams = ops.softmax_quantize(x, 0.3, *given)
    assert probabilities[0].isnan().all() and probabilities[1].tolist() == [0.0, 1.0, 0.0] and qparams[0].isnan()


# ---- pools ----

WINDOWS: dict[str, list[int]] = {  # kernel, stride, padding, dilation, ceil_mode
    "2x2": [2, 2, 2, 2, 0, 0, 1, 1, 0],
    "3x3": [3, 3, 2, 2, 1, 1, 1, 1, 0],
    "3x2, rounded up": [3, 2, 2, 3, 1, 0, 1, 1, 1],
    "none behind": [3, 3, 3, 3, 1, 1, 1, 1, 1],
    "apart": [2, 3, 1, 2, 1, 1, 2, 1, 0],
    "gaps": [1, 2, 3, 4, 0, 0, 1, 1, 1],
    "one": [1, 1, 1, 1, 0, 0, 1, 1, 0],
    "whole": [11, 13, 1, 1, 0, 0, 1, 1, 0],
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("channels", [1, 5, 24, 70])
def test_pools(channels: int, name: str, layout: torch.memory_format, ops: Any) -> None:
    """Few levels, so that there are ties; 0 in the corners, where there is padding."""
    codes = (draw_codes(2, channels, 11, 13) % 4).to(memory_format=layout)
    codes[0, :, :3, :3], codes[1, :, -4:, -4:] = 0, 255
    *window, ceil_mode = WINDOWS[name]
    wide = codes.double().contiguous().requires_grad_()  # torch's own keeps the first largest in this format
    expected = torch.nn.functional.max_pool2d(wide, *(window[k : k + 2] for k in (0, 2, 4, 6)), bool(ceil_mode))
    out, where = ops.max_pool_codes(codes, WINDOWS[name])
    assert torch.equal(out.double(), expected) and out.is_contiguous(memory_format=layout) and out.dtype is torch.uint8
    for grad in (draw(*out.shape).to(memory_format=layout), draw(*out.shape), torch.ones(out.shape)):
        found = ops.max_pool_codes_backward(grad, where, 11, 13, WINDOWS[name])
        (wanted,) = torch.autograd.grad(expected, wide, grad.double(), retain_graph=True)
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous() or (layout is torch.channels_last and not where.is_contiguous())


@pytest.mark.parametrize("layout", ["flat", "images"])
def test_an_infinite_score_behind_a_clip_has_no_gradient(layout: str, ops: Any) -> None:
    """A mask of -inf and a ReLU behind it: the distance to a mean of 0 times a factor of 0 was NaN."""
    y = draw(6, 8) if layout == "flat" else draw(2, 8, 3, 3)
    y.view(-1)[::5] = -math.inf
    norm = [torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8)]
    found = ops.norm_quantize_backward(draw(*y.shape, seed=1), y, norm, [0.0, math.inf], *GRIDS["affine"], False, True)
    assert found[0].isfinite().all() and not found[0].view(-1)[::5].any()
