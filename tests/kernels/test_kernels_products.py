"""Products of integer codes: exact in every kind of convolution, used where they pay, and their gradients."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.kernels import float_products, plain_formulas
from qat.kernels.cpu import compiler, onednn
from qat.kernels.geometry import ROWS_AS_MATRICES, Geometry, to_layout
from tests.references.cases_fused import prepared, two_threads
from tests.references.processors import untried

__all__ = ["two_threads", "untried"]  # fixtures

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")

CONVOLUTIONS = {
    # input channels, output channels, groups, kernel, stride, padding, dilation
    "dense": (7, 12, 1, 3, 2, 1, 1),
    "grouped": (12, 8, 4, 3, 1, 1, 2),
    "grouped, odd": (15, 21, 3, 5, 2, 2, 1),
    "grouped 1x1": (66, 34, 2, 1, 1, 0, 1),
    "depthwise": (35, 35, 35, 3, 1, 1, 1),
    "depthwise, strided": (64, 64, 64, 7, 2, 3, 1),
}


def needs_exact(kind: str) -> None:
    if not onednn.are_exact(kind):
        pytest.skip(f"this processor has no exact integer convolution ({kind})")


@pytest.mark.parametrize("zero", [0.0, 117.0, 255.0])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_sums_are_exact(name: str, zero: float) -> None:
    inputs, outputs, groups, kernel, stride, padding, dilation = CONVOLUTIONS[name]
    needs_exact("dense" if groups == 1 else "depthwise" if groups == inputs else "grouped")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, inputs, 13, 11), dtype=torch.uint8, generator=generator)
    weight = torch.randint(
        -127, 128, (outputs, inputs // groups, kernel, kernel), dtype=torch.int8, generator=generator
    )
    codes[0], weight[0], weight[1] = 255, 127, -127
    steps = 2.0 ** (torch.arange(outputs) % 3 - 1)
    geometry = Geometry([stride] * 2, [padding] * 2, [dilation] * 2, groups)
    expected = F.conv2d(codes.double() - zero, weight.double(), None, stride, padding, dilation, groups)
    for each in (codes, codes.to(memory_format=torch.channels_last)):
        found = geometry.multiply_integers(each, 0.5, zero, weight, steps, None)
        assert torch.equal(found.double(), expected * steps.double().view(-1, 1, 1) * 0.5)


def of_groups(groups: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=groups)), torch.randn(8, 64, 56, 56)


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_what_pays_runs_on_integers(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ from the float product by rounding only."""
    needs_exact({1: "dense", 4: "grouped", 64: "depthwise"}[groups])
    model, x = of_groups(groups)
    quantized, calls = prepared(model, x), []
    original = onednn.convolution

    def convolution(*operands: Any) -> Tensor:
        calls.append(operands[-1])
        return original(*operands)

    monkeypatch.setattr(onednn, "convolution", convolution)
    with float_products():
        in_float = quantized(x)
    assert calls == []
    in_integers = quantized(x)
    assert calls == [groups]
    assert torch.allclose(in_float, in_integers, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("granularity", "value"), [("channel", math.nan), ("tensor", math.nan), ("channel", math.inf)])
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_a_weight_that_is_no_number_acts_as_in_float(groups: int, value: float, granularity: str) -> None:
    needs_exact({1: "dense", 4: "grouped", 64: "depthwise"}[groups])
    model, x = of_groups(groups)
    with torch.no_grad():
        model[0].weight[5, 0, 1, 1] = 1.0
    spec = qat.QuantSpec(granularity=granularity, narrow_range=False)
    quantized = qat.prepare(model, qat.QuantRecipe(weight=spec), example_inputs=x)
    qat.calibrate(quantized, [x])
    with torch.no_grad():
        quantized.train().get_parameter("0.weight")[5, 0, 1, 1] = value
    with float_products():
        in_float = quantized(x)
    with plain_formulas():
        plain = quantized(x)
    in_integers = quantized(x)
    assert torch.equal(in_integers.isnan(), in_float.isnan()) and torch.equal(in_float.isnan(), plain.isnan())
    assert bool(in_integers[:, 5].isnan().all()) == (value != value) and in_integers[:, :5].isfinite().all()
    assert torch.allclose(in_integers, in_float, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("wrong", ["grouped", "depthwise"])
def test_a_kind_that_is_wrong_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_exact("dense")
    onednn.are_exact.cache_clear()  # it has been tried just now
    original, calls = onednn.convolution, []

    def saturating(*operands: Any) -> Tensor:
        calls.append(operands[-1])
        y = original(*operands)
        return y.clamp(-1000, 1000) if operands[-1] == onednn.KINDS[wrong] else y

    monkeypatch.setattr(onednn, "convolution", saturating)
    assert {kind: onednn.are_exact(kind) for kind in onednn.KINDS}[wrong] is False
    assert onednn.are_exact("dense")
    model, x = of_groups(4 if wrong == "grouped" else 64)
    quantized = prepared(model, x)
    calls.clear()
    assert quantized(x).isfinite().all()
    assert calls == []


@pytest.mark.parametrize(
    ("shape", "weight", "groups", "zero", "pays"),
    [
        ((16, 64, 28, 28), (64, 64, 3, 3), 1, 0.0, True),
        ((16, 64, 28, 28), (64, 16, 3, 3), 4, 0.0, True),
        ((16, 16, 28, 28), (16, 2, 3, 3), 8, 0.0, False),  # 18 products for every output
        ((1, 64, 14, 14), (64, 16, 3, 3), 4, 0.0, False),  # a small image
        ((16, 96, 56, 56), (96, 1, 3, 3), 96, 0.0, True),
        ((16, 96, 28, 28), (96, 1, 3, 3), 96, 0.0, True),
        ((16, 96, 28, 28), (96, 1, 3, 3), 96, 9.0, False),  # a zero point makes packing dearer
        ((16, 192, 14, 14), (192, 1, 3, 3), 192, 0.0, False),
        # sums could leave int32: 2^31 / (255 * 127) = 66,312
        ((4096, 1 << 16), (8, 1 << 16), 1, 0.0, True),
        ((4096, 66_000), (8, 66_000), 1, 0.0, False),
        ((2, 7000, 64, 64), (8, 7000, 3, 3), 1, 0.0, True),
        ((2, 7400, 64, 64), (8, 7400, 3, 3), 1, 0.0, False),
        # exact on some processors where the self-test is, not on all
        ((16, 96, 56, 56), (192, 1, 7, 7), 96, 0.0, False),
    ],
)
def test_when_integers_pay(
    shape: tuple[int, ...], weight: tuple[int, ...], groups: int, zero: float, pays: bool
) -> None:
    geometry = Geometry(*([1] * (len(shape) - 2) for _ in range(3)), groups)  # type: ignore[call-arg, arg-type]
    assert (geometry.integers_refusal(torch.Size(shape), torch.Size(weight), zero) is None) is pays


@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize("size", [2, 9, 40])
def test_gradients_of_a_1x1_convolution(
    size: int, needs: tuple[bool, bool, bool], weight_format: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (
        torch.randn(2, channels, size, size, generator=generator).to(memory_format=torch.channels_last)
        for channels in (24, 40)
    )
    weight = torch.randn(40, 24, 1, 1, generator=generator).to(memory_format=weight_format)
    geometry = Geometry([1, 1], [0, 0], [1, 1], 1)
    assert geometry._is_product_of_rows(grad, x, weight) is (size == 9)
    assert ROWS_AS_MATRICES[0] <= 2 * 9 * 9 <= ROWS_AS_MATRICES[1]
    found = geometry.gradients(grad, x, weight, needs)
    options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
    expected = torch.ops.aten.convolution_backward(grad.double(), x.double(), weight.double(), [40], *options)
    for wanted, got, exact, like in zip(needs, found, expected, (x, weight, None), strict=True):
        assert (got is not None) is wanted
        if got is not None:
            assert (got.double() - exact).norm() < 1e-5 * exact.norm()
            assert like is None or got.stride() == like.stride() or size != 9


def test_other_convolutions_are_no_matrix_products() -> None:
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
    plain = Geometry([1, 1], [0, 0], [1, 1], 1)
    weight = torch.randn(8, 8, 1, 1)
    assert plain._is_product_of_rows(x, x, weight)
    assert not plain._is_product_of_rows(x.contiguous(), x, weight)
    assert not plain._is_product_of_rows(x, x, torch.randn(8, 8, 3, 3))
    for other in (([2, 2], [0, 0], 1), ([1, 1], [1, 1], 1), ([1, 1], [0, 0], 2)):
        assert not Geometry(other[0], other[1], [1, 1], other[2])._is_product_of_rows(x, x, weight)


@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), (1, 4), (1, 3), (1, 3))))
def test_results_have_the_strides_of_torchs(sizes: tuple[int, ...], weight_format: torch.memory_format) -> None:
    """Whatever the strides of the images: axes of length 1 may have any, and torch reads its memory format off them."""
    geometry, weight = Geometry([1, 1], [0, 0], [1, 1], 1), torch.ones(4, sizes[1], 1, 1)
    weight = weight.contiguous(memory_format=weight_format)
    for order in itertools.permutations(range(4)):
        moved = torch.ones([sizes[axis] for axis in order]).permute([order.index(axis) for axis in range(4)])
        for x in (moved, moved.contiguous(), torch.cat([moved, moved], 3)[..., : sizes[3]]):
            y = F.conv2d(x, weight * 1)  # as a quantizer gives it
            assert to_layout(torch.empty(y.shape), geometry.layout(x, weight)).stride() == y.stride(), x.stride()
