"""A call of every formula in qat.kernels.formulas: the operator it stands for, and small arguments of both."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat.kernels.cpu import quantizers as cpu_quantizers
from qat.kernels.formulas import curves as f_curves
from qat.kernels.formulas import matmuls as f_matmuls
from qat.kernels.formulas import norms as f_norms
from qat.kernels.formulas import pools as f_pools
from qat.kernels.formulas import products as f_products
from qat.kernels.formulas import quantizers as f_quantizers
from qat.kernels.operators import curves, matmuls, norms, pools, products, quantizers

OPERATORS = {
    name: value
    for module in (cpu_quantizers, curves, matmuls, norms, pools, products, quantizers)
    for name, value in vars(module).items()
}
FORMULAS = {
    name: value
    for module in (f_curves, f_matmuls, f_norms, f_pools, f_products, f_quantizers)
    for name, value in vars(module).items()
}
Grid = tuple[Tensor, Tensor, Tensor | None, int, int, int, float, bool]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x.flatten(),
    "rows": lambda x: x.flatten(0, 2),
    "images": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "turned": lambda x: x.flatten(0, 2).T,
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def grids() -> dict[str, Grid]:
    """scale, smallest, zero point, low, high, shift, factor, relative."""

    def grid(scale: float, zero: float | None, low: int, high: int, shift: int, relative: bool) -> Grid:
        point = None if zero is None else torch.tensor(zero)
        return torch.tensor(scale), torch.tensor(0.013), point, low, high, shift, 0.3, relative

    return {
        "signed": grid(0.021, None, -128, 127, 128, False),
        "unsigned": grid(0.023, None, 0, 255, 0, False),
        "affine": grid(0.03, 94.0, 0, 255, 0, True),
        "signed affine": grid(0.17, -3.0, -8, 7, 128, False),
        "broken": grid(-0.02, None, -128, 127, 128, True),
        "broken affine": grid(0.01, 120.0, 0, 255, 0, False),
        "huge": grid(1e13, None, -128, 127, 128, False),
        "two bits": grid(0.9, None, 0, 3, 0, True),
    }


def slopes(values: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: values on their grid before rounding, whether the gradient passes, and the step's slope."""
    step = float(grid[0].clamp(float(grid[1]), 1e12))
    zero = 0.0 if grid[2] is None else float(grid[2])
    v = values.double() / step
    bounded = v.clamp(grid[3] - zero, grid[4] - zero)
    inside = bounded == v
    return v, inside, torch.where(inside, v.round() - v, bounded)


def scale_factor(grid: Grid) -> float:
    """Of the scale's gradient."""
    step = float(grid[0].clamp(float(grid[1]), 1e12))
    return grid[6] * (step**2 if grid[7] else 1.0)


def dense(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the axes that have some length."""
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


class Call(NamedTuple):
    """An operator, the formula with its name, and arguments."""

    operator: Callable[..., Any]
    formula: Callable[..., Any]
    arguments: tuple[Any, ...]


def weight_of(*shape: int, per_row: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scales, of which one is broken and one clips, and smallest."""
    weight = draw(*shape, seed=3)
    scales = torch.full((shape[0] if per_row else 1, *[1] * (len(shape) - 1)), 0.02)
    if per_row:
        scales[0], scales[1] = -1.0, 0.005
    return weight, scales, torch.full_like(scales, 0.004)


def calls() -> dict[str, Call]:
    """By name."""
    affine, signed = grids()["affine"], grids()["signed affine"]
    x, grad = draw(4, 8, 5, 6), draw(4, 8, 5, 6, seed=1)
    a, b = draw_codes(4, 8, 5, 6), draw_codes(4, 8, 5, 6, seed=1)
    numbers = torch.tensor([0.02, 128.0]), torch.tensor([0.05, 7.0])
    norm = (draw(8).abs(), draw(8, seed=1), draw(8, seed=2), draw(8, seed=3).abs() + 0.5)
    bounds, window = (0.0, 2.0), ([3, 2], [2, 1], [1, 1], [1, 1])
    weight, rows = weight_of(16, 8, 3, 3), draw_codes(20, 8)
    grad_y, geometry = draw(4, 16, 5, 6, seed=2), ([1, 1], [1, 1], [1, 1], 1)
    found: dict[str, tuple[Any, ...]] = {
        "quantize_codes": (x, *affine),
        "quantize_codes_backward": (grad, x, *affine, True),
        "add_quantize": (a, b, *numbers, *bounds, *affine),
        "add_quantize_backward": (grad, a, b, *numbers, *bounds, *affine),
        "dequantize": (a, numbers[0]),
        "batch_statistics": (x, 1e-5),
        "norm_quantize": (x, *norm, *bounds, *signed),
        "norm_quantize_backward": (grad, x, *norm, *bounds, *signed, True, True),
        "softmax_quantize": (x, 0.3, *affine),
        "softmax_quantize_backward": (grad, x.softmax(-1), 0.3, *affine),
        "max_pool_codes": (a, *window, True),
        "max_pool_codes_backward": (draw(4, 8, 3, 7), draw_codes(4, 8, 3, 7) % 6, 5, 6, *window),
        "codes_matmul": (a, b.mT.contiguous(), *numbers),
        "codes_matmul_backward": (draw(4, 8, 5, 5), a, b.mT.contiguous(), *numbers),
        "codes_product": (a, numbers[0], *weight, draw(16), -127, 127, *geometry, False),
        "codes_product in integers": (rows, numbers[0], *weight_of(16, 8), None, -127, 127, [], [], [], 1, True),
        "codes_product_backward": (
            grad_y, a, numbers[0], *weight, -127, 127, 0.1, True, *geometry, True, True, True,
        ),
        "input_scale_gradient": (grad_y, x, *affine, *weight, -127, 127, *geometry),
    }  # fmt: skip
    for curve in f_curves.CURVES:
        found[f"curve_quantize {curve}"] = (x, curve, *affine)
        found[f"curve_quantize_backward {curve}"] = (grad, x, curve, *affine)
    return {name: Call(OPERATORS[name.split()[0]], FORMULAS[name.split()[0]], given) for name, given in found.items()}
