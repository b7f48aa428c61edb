"""The backward of BatchNorm, clamp and quantizer where rounding decides: at the ends of grid and clamp."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qat.kernels.cpu import compiler
from qat.kernels.operators.quantizers import norm_quantize_backward

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")

CLIPS = ((-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0), (-1.0, 1.0))


def neighbours(value: float, count: int = 4) -> list[float]:
    """The floats around a value, and itself."""
    found = [np.float32(value)]
    for towards in (np.float32(-np.inf), np.float32(np.inf)):
        each = np.float32(value)
        for _ in range(count):
            each = np.nextafter(each, towards)
            found.append(each)
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
@pytest.mark.parametrize("step", [1.0, 0.02, 1 / 3, 7.3e-6, 1e-20, 3.7e6, 1e12])
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


def test_a_zero_point_acts_as_the_formulas_does_rounded_and_within_the_grid() -> None:
    z = torch.linspace(-3, 3, 64).view(1, 4, 4, 4)
    for given, acts in ((2.4, 2), (-7.0, 0), (99.0, 15)):
        found, expected = (gradient(z, 0.2, zero, 0, 15, CLIPS[0]) for zero in (given, float(acts)))
        assert torch.equal(found, expected) and 0 < found.sum() < found.numel()


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_clamp_passes_nothing_at_its_ends_when_denormals_are_flushed(layout: torch.memory_format) -> None:
    z = torch.tensor([0.0, 1.0, 6.0]).repeat(4).view(1, 4, 3, 1).expand(1, 4, 3, 2).contiguous(memory_format=layout)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = gradient(z, 0.1, 0.0, 0, 255, (0.0, 6.0))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, ((z > 0) & (z < 6)).float())
