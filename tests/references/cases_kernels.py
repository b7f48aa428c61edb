"""The operators on codes: both implementations, arguments for every one, and a quantizer in float64."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qat.codes.operators import add, curves, matmul, norm, pool, product, quantize
from qat.codes.operators.geometry import Geometry
from qat.kernels.cpu import compiler
from qat.kernels.cpu import quantizers as cpu_quantizers

Grid = tuple[list[Tensor | None], list[float]]
"""A quantizer's tensors and levels, as operators take them."""


OPERATORS = {
    name: value
    for module in (add, curves, matmul, norm, pool, product, quantize)
    for name, value in vars(module).items()
    if hasattr(value, "formula") and value.__module__ == module.__name__
}
C = SimpleNamespace(**OPERATORS, dequantize=cpu_quantizers.dequantize)
FORMULA = SimpleNamespace(**{name: each.formula for name, each in OPERATORS.items()}, dequantize=quantize._dequantize)


IMPLEMENTATIONS = {"C": C, "formula": FORMULA}


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Any:
    if request.param == "C" and compiler.library() is None:
        pytest.skip("no C compiler here")
    return IMPLEMENTATIONS[request.param]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x.flatten(),
    "images": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "turned": lambda x: x.flatten(0, 2).T,
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def grid(
    scale: float, zero: float | None = None, low: int = 0, high: int = 255, shift: int = 0, relative: bool = False,
    smallest: float = 0.013, factor: float = 0.3,
) -> Grid:  # fmt: skip
    point = None if zero is None else torch.tensor(zero)
    levels = [float(low), float(high), float(shift), factor, float(relative)]
    return [torch.tensor(scale), torch.tensor(smallest), point], levels


GRIDS: dict[str, Grid] = {
    "signed": grid(0.021, None, -128, 127, 128),
    "unsigned": grid(0.023),
    "affine": grid(0.03, 94.3, relative=True),
    "signed affine": grid(0.17, -3.4, -8, 7, 128),
    "broken": grid(-0.02, None, -128, 127, 128, relative=True),
    "broken affine": grid(0.01, -7.0),
    "no number": grid(math.nan, None, -128, 127, 128, relative=True),
    "infinite": grid(math.inf, 94.0),
    "below all": grid(-math.inf, None, -128, 127, 128),
    "huge": grid(1e13, None, -128, 127, 128),
    "two bits": grid(0.9, None, 0, 3, relative=True),
}


def steps_of(scales: Tensor, smallest: Tensor) -> Tensor:
    """What broken scales act as: NaN as the smallest one."""
    return torch.minimum(torch.maximum(scales.nan_to_num(0.0, math.inf), smallest), torch.tensor(1e18))


class Quantized:
    """A tensor on a grid in float64.

    Args:
        z: what is quantized. Float32 is taken as it is, and its quotient rounded as everywhere; of float64 it is
            assumed that float32 decides otherwise next to a tie or a bound.
        given: the grid.

    Attributes:
        codes: what they should be.
        inside: where the gradient passes.
        slope: the derivative by the step.
        ties: where float32 may find the code next to it.
        unsure: where float32 may find another code or gradient.
        near: the distance, in steps, at which it may.
        factor: of the scale's gradient.
    """

    def __init__(self, z: Tensor, given: Grid) -> None:
        (scale, smallest, zero), (low, high, shift, factor, relative) = given
        assert scale is not None and smallest is not None
        self.step, self.zero = (
            steps_of(scale, smallest),
            0.0 if zero is None else min(max(round(float(zero)), low), high),
        )
        self.only_rises = bool(scale < smallest)
        v = (z / self.step.to(z.dtype)).double()
        self.near = near = 0.0 if z.dtype is torch.float32 else 1e-4
        bounds = low - self.zero, high - self.zero
        self.codes = (v.round() + self.zero).clamp(low, high) + shift
        bounded = v.clamp(*bounds)
        self.inside = bounded == v
        self.slope = torch.where(self.inside, v.round() - v, bounded)
        self.ties = (v - v.floor() - 0.5).abs() < near
        self.unsure = self.ties.clone()
        for bound in bounds:
            self.unsure |= (v != bound) & ((v - bound).abs() < near)
        self.qparams = torch.stack([self.step, torch.tensor(self.zero + shift)])
        self.factor = factor * (float(self.step) ** 2 if relative else 1.0)

    def check_codes(self, codes: Tensor, qparams: Tensor, pattern: Tensor) -> None:
        assert torch.equal(qparams, self.qparams)
        assert codes.dtype is torch.uint8 and codes.stride() == pattern.stride()
        assert bool(((codes.double() - self.codes).abs() <= self.ties.double()).all())
        assert self.ties.double().mean() < 2e-3

    def check_scale(self, found: Tensor, grad: Tensor) -> None:
        """factor * sum(grad * slope), whose slope jumps by one at a tie."""
        terms = grad.double() * self.slope
        size = grad.double().abs()
        slack = float(1e-5 * terms.abs().sum() + size[self.unsure].sum() + self.near * size.sum())
        total = terms.sum().view(found.shape)
        total = total.clamp(max=0.0) if self.only_rises else total  # a broken scale is not lowered further
        near(found, total * self.factor, slack * self.factor)


def near(found: Tensor, expected: Tensor, allowed: Tensor | float) -> None:
    assert found.shape == expected.shape
    assert bool(((found.double() - expected.double()).abs() <= allowed + 1e-30).all())


def same(found: Tensor, expected: Tensor) -> None:
    """To the bit, NaN included."""
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(found.nan_to_num(123.0), expected.nan_to_num(123.0))


def dense(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the axes that have some length."""
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def weight_of(*shape: int, per_row: bool = True, relative: bool = False) -> tuple[Tensor, list[Any], list[float]]:
    """A weight, its grid, of which two scales are broken and one clips, and its levels."""
    scales = torch.full((shape[0] if per_row else 1, *[1] * (len(shape) - 1)), 0.02)
    if per_row:
        scales[0], scales[1], scales[2] = -1.0, 0.005, math.nan
    levels = [-127.0, 127.0, 0.0, 0.1, float(relative)]
    return draw(*shape, seed=3), [scales, torch.full_like(scales, 0.004), None], levels


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, by its name and a word for the case."""
    affine, signed = GRIDS["affine"], GRIDS["signed affine"]
    x, grad = draw(4, 8, 5, 6), draw(4, 8, 5, 6, seed=1)
    a, b = draw_codes(4, 8, 5, 6), draw_codes(4, 8, 5, 6, seed=1)
    qparams = torch.tensor([0.02, 128.0]), torch.tensor([0.05, 7.0])
    norm = [draw(8).abs(), draw(8, seed=1), draw(8, seed=2), draw(8, seed=3).abs() + 0.5]
    clip, window = [0.0, 2.0], [3, 2, 2, 1, 1, 1, 1, 1, 1]
    geometry, rows = Geometry([1, 1], [1, 1], [1, 1], 1).packed(), Geometry([], [], [], 1).packed()
    weight, grad_y = weight_of(16, 8, 3, 3, relative=True), draw(4, 16, 5, 6, seed=2)
    return {
        "quantize_codes": (x, *affine),
        "quantize_codes_backward": (grad, x, *affine, True),
        "add_quantize": (a, b, *qparams, clip, *affine),
        "add_quantize_backward": (grad, a, b, *qparams, clip, *affine),
        "batch_statistics": (x, 1e-5),
        "norm_quantize": (x, norm, clip, *signed),
        "norm_quantize_backward": (grad, x, norm, clip, *signed, True, True),
        "norm_quantize_backward of constants": (grad, x, norm, clip, *signed, False, False),
        "softmax_quantize": (x, 0.3, *affine),
        "softmax_quantize_backward": (grad, x.softmax(-1), 0.3, *affine),
        "softmax_quantize_backward turned": (draw(4, 8, 6, 5).mT, x.softmax(-1), 0.3, *affine),
        "max_pool_codes": (a, window),
        "max_pool_codes_backward": (draw(4, 8, 3, 7), draw_codes(4, 8, 3, 7) % 6, 5, 6, window),
        "codes_matmul": (a, b.mT.contiguous(), *qparams),
        "codes_matmul_backward": (draw(4, 8, 5, 5), a, b.mT.contiguous(), *qparams),
        "codes_product": (a, qparams[0], *weight, draw(16), geometry, 0),
        "codes_product of one image": (a[:1], qparams[0], *weight, None, geometry, 0),
        "codes_product in integers": (draw_codes(20, 8), qparams[0], *weight_of(16, 8), None, rows, 1),
        "codes_product_backward": (grad_y, a, qparams[0], *weight, geometry, True, True, True),
        "codes_product_backward of x": (grad_y, a, qparams[0], *weight, geometry, True, False, False),
        "input_scale_gradient": (grad_y, x, *affine, *weight, geometry),
        **{f"curve_quantize {curve}": (x, curve, *affine) for curve in curves.CURVES},
        **{f"curve_quantize_backward {curve}": (grad, x, curve, *affine) for curve in curves.CURVES},
    }


NO_CLIP = [-math.inf, math.inf]
