"""The arithmetic of fixed point against gemmlowp's, in NumPy, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qat
from qat.integers.fixed_point import headroom, quantized_multiplier, rescaled


def by_gemmlowp(x: int, multiplier: int, shift: int) -> int:
    """MultiplyByQuantizedMultiplier, as gemmlowp's scalar code has it, whose division truncates as C's does."""
    product = x * 2 ** max(shift, 0) * multiplier
    nudged = product + (2**30 if product >= 0 else 1 - 2**30)
    high = int(np.sign(nudged)) * (abs(nudged) // 2**31)
    exponent = max(-shift, 0)
    mask = 2**exponent - 1
    threshold = mask // 2 + (1 if high < 0 else 0)
    return (high >> exponent) + (1 if high & mask > threshold else 0)


def test_multipliers_are_close_and_normal() -> None:
    for real in [*np.exp(np.random.default_rng(0).uniform(-20, 5, 1000)), 1.0, 0.5, 1 - 2**-40]:
        multiplier, shift = quantized_multiplier(float(real))
        assert 2**30 <= multiplier < 2**31
        assert multiplier * 2.0 ** (shift - 31) == pytest.approx(real, rel=2**-31)
    assert quantized_multiplier(2.0**-40) == (0, 0)


def test_rescaling_rounds_twice() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.integers(-(2**24), 2**24, 3000), np.arange(-300, 300)])
    for real in [0.5, 0.25, 0.75, 1.0, 3.0, 2.0**-9, *np.exp(rng.uniform(-9, 1, 20))]:
        multiplier, shift = quantized_multiplier(float(real))
        found = rescaled(torch.from_numpy(x), torch.tensor(multiplier), torch.tensor(shift))
        assert found.tolist() == [by_gemmlowp(int(each), multiplier, shift) for each in x]
    # 5/8 is rounded to its half first, and then away from zero; once, it is rounded to 1 too, but 3/8 is not.
    multiplier, shift = quantized_multiplier(0.125)
    assert rescaled(torch.tensor([3, 4, -4]), torch.tensor(multiplier), torch.tensor(shift)).tolist() == [1, 1, -1]


def test_headroom_fills_int8_and_keeps_the_bias() -> None:
    bias = torch.tensor([2**28 - 1, -3])
    assert headroom(torch.tensor([[1, -1]]), torch.tensor([5])) == 64
    assert headroom(torch.tensor([[7, -8]]), torch.tensor([5])) == 8
    assert headroom(torch.tensor([[1, -1]]), bias) == 4
    assert headroom(torch.tensor([[0]]), torch.tensor([0])) == 64


class Two(nn.Module):
    """Two convolutions with a function between."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore::qat.export.litert.exporter.UnwritableWarning")
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: F.softmax(x, 1), "softmax"),
        (F.gelu, "gelu"),
        (F.hardswish, "hardswish"),
        (lambda x: F.interpolate(x, scale_factor=2.0), "interpolate"),
        (lambda x: x / 3, "truediv"),
        (lambda x: x + 1, "add"),
        (lambda x: torch.sigmoid(x.reshape(x.shape)), "sigmoid"),
        (lambda x: x.mean(3, keepdim=True), "mean"),
        (lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False), "avg_pool2d"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_fixed_point_is_not_defined_for_is_refused_by_name(function: object, named: str) -> None:
    x = 2000 * torch.randn(2, 4, 6, 6)  # too coarse for the kernel of a sigmoid
    model = qat.prepare(Two(function), qat.QuantRecipe(target="litert"), x)
    qat.calibrate(model, [x])
    with pytest.raises(ValueError, match=rf"^convert: fixed point is not defined for {named} \('\w+'\) here$"):
        qat.convert(model.eval(), "reference", requantize="fixed_point")


@pytest.mark.filterwarnings("ignore::qat.export.litert.exporter.UnwritableWarning")
def test_other_requests_are_refused_in_a_sentence() -> None:
    x = torch.randn(2, 4, 6, 6)
    model = qat.prepare(Two(nn.AdaptiveAvgPool2d(4)), qat.QuantRecipe(target="litert"), x)
    qat.calibrate(model, [x])
    with pytest.raises(ValueError, match=r"requantize must be one of float32, fixed_point, got 'int32'$"):
        qat.convert(model.eval(), "reference", requantize="int32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fixed point is computed with execution='reference', got 'onednn'$"):
        qat.convert(model.eval(), requantize="fixed_point")
    with pytest.raises(
        ValueError, match=r"^fixed point averages equal windows only, got \(6, 6\) pixels for \(4, 4\)$"
    ):
        qat.convert(model.eval(), "reference", requantize="fixed_point")(x)
