"""Every operator, in C and by formula, against the same computation in float64; where nothing rounds, to the bit."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
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


class Row(NamedTuple):
    """An operator that ends in a quantizer: what it is given, and what it quantizes in plain operations of torch."""

    name: str
    given: tuple[Any, ...]
    leaves: tuple[Tensor, ...]
    plain: Callable[..., Tensor]
    clip: list[float] = NO_CLIP
    ends: tuple[bool, ...] = ()
    """Of the backward. The last one is whether the first input needs a gradient."""
    close: tuple[float, float] | None = None
    """rtol and atol of the gradient; without them nothing rounds, and it is the same to the bit."""


def a_tensor(layout: str) -> Row:
    x = LAYOUTS[layout](draw(4, 8, 9, 51))
    return Row("quantize_codes", (x,), (x,), lambda x: x, ends=(True,))


def a_sum(layout: str, clip: list[float], *steps: float) -> Row:
    a, b = (LAYOUTS[layout](draw_codes(6, 8, 9, 11, seed=seed)) for seed in (0, 1))
    qparams = torch.tensor([steps[0], 128.0]), torch.tensor([steps[1], 17.0])
    values = [(each.float() - pair[1]) * pair[0] for each, pair in zip((a, b), qparams, strict=True)]
    return Row("add_quantize", (a, b, *qparams, clip), (values[0] + values[1],), lambda z: z, clip)


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


def a_norm(kind: str, clip: list[float], follows: bool) -> Row:
    y = VOLUMES[kind]() * 3
    mean, inverse, _ = FORMULA.batch_statistics(y, 1e-5)
    gamma, beta = 1 + 0.1 * draw(12, seed=1), 0.3 * draw(12, seed=2)
    running = None if follows else mean.double(), None if follows else inverse.double() ** -2

    def plain(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        rows = y if y.dim() > 3 else y.flatten(0, -2)
        return F.batch_norm(rows, *running, gamma, beta, follows, eps=1e-5 if follows else 0.0).view_as(y)

    norm = [gamma, beta, mean, inverse]
    return Row("norm_quantize", (y, norm, clip), (y, gamma, beta), plain, clip, (follows, True), (1e-4, 1e-5))


CURVES: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "hardswish": F.hardswish
}  # fmt: skip


def a_curve(curve: str, *shape: int) -> Row:
    x = draw(*shape) * 3
    x.view(-1)[:2] = torch.tensor([-3.0, 3.0])  # where the slope of hardswish jumps
    return Row("curve_quantize", (x, curve), (x,), CURVES[curve], close=(1e-5, 2e-6))


STEPS = [(0.0123, 0.0057), (0.5, 0.25)]  # with the latter, sums lie on the bounds
ROWS: dict[str, Callable[[], Row]] = {
    **{f"tensor, {each}": partial(a_tensor, each) for each in LAYOUTS},
    **{f"sum, {each}": partial(a_sum, *each[:2], *each[2]) for each in product(LAYOUTS, CLIPS, STEPS)},
    **{f"norm, {each}": partial(a_norm, *each) for each in product(VOLUMES, CLIPS, (True, False))},
    **{f"{each}": partial(a_curve, *each) for each in (*((c, 7) for c in CURVES), *((c, 41, 501) for c in CURVES))},
}


@pytest.mark.parametrize("case", ROWS)
def test_an_operator_is_the_quantizer_behind_plain_operations(case: str, ops: Any) -> None:
    row = ROWS[case]()
    forward, backward = getattr(ops, row.name), getattr(ops, f"{row.name}_backward")
    leaves = [(each.double() if row.close else each).detach().requires_grad_() for each in row.leaves]
    z = row.plain(*leaves)
    values, clipped = z.detach(), F.hardtanh(z, *row.clip) if row.clip != NO_CLIP else z
    drawn = draw(*values.shape, seed=1)
    placed = torch.empty_like(row.given[0], dtype=torch.float32).copy_(drawn)
    others = {"quantize_codes": (drawn, placed[:1].expand_as(placed)), "norm_quantize": (drawn,)}
    for given, grad in product(GRIDS.values(), (placed, *others.get(row.name, ()))):
        expected = Quantized(clipped.detach(), given)
        expected.check_codes(*forward(*row.given, *given), row.given[0])
        *found, scale = backward(grad, *row.given, *given, *row.ends)
        expected.check_scale(scale, grad)
        passed = torch.where(expected.inside, grad, 0.0).to(z.dtype)
        wanted = torch.autograd.grad(clipped, leaves, passed, retain_graph=True)
        if row.close is None:
            same(found[0], torch.empty_like(row.given[0], dtype=torch.float32).copy_(wanted[0]))
        else:
            unsure = expected.unsure | ((values - row.clip[0]).abs() < 1e-5) | ((values - row.clip[1]).abs() < 1e-5)
            check_gradients(row, grad, found, wanted, unsure)
        if row.ends:
            *unasked, again = backward(grad, *row.given, *given, *row.ends[:-1], False)
            assert not unasked[0].numel() and torch.allclose(again, scale, equal_nan=True)
    if row.given[0].is_floating_point():
        spoilt = row.given[0].clone()
        spoilt[(0,) * spoilt.dim()] = math.nan
        assert forward(spoilt, *row.given[1:], *given)[1].isnan().tolist() == [True, False]


def check_gradients(row: Row, grad: Tensor, found: list[Tensor], wanted: tuple[Tensor, ...], unsure: Tensor) -> None:
    """Of the first input, and of a norm's gamma and beta."""
    assert row.close is not None and found[0].stride() == row.given[0].stride()
    rtol, atol = row.close
    if len(found) > 1:
        axes, g = across(grad), grad.double().abs()
        loose = (g * unsure).sum(axes)
        atol += float(loose.max()) / 50
        near(found[1], wanted[1], 3e-5 * g.sum(axes) + 10 * loose)
        near(found[2], wanted[2], 1e-5 * g.sum(axes) + loose)
    assert bool((torch.isclose(found[0].double(), wanted[0], rtol=rtol, atol=atol) | unsure).all())


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_of_a_sum_alone_and_of_a_grid_that_is_no_number(layout: str, ops: Any) -> None:
    a, b, one, other, clip = a_sum(layout, NO_CLIP, *STEPS[0]).given
    same(ops.dequantize(a, one), (a.float() - one[1]) * one[0])
    assert ops.add_quantize(a, b, one * math.nan, other, clip, *GRIDS["affine"])[1][0].isnan()


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
