"""Products of integer codes: exact in every kind of convolution, used where they pay, and their gradients."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.codes.operators.geometry import Geometry, to_layout
from qat.kernels import float_products
from qat.kernels.cpu import compiler, onednn
from tests.references.cases_fused import prepared, two_threads
from tests.references.processors import untried

__all__ = ["two_threads", "untried"]  # fixtures

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


def needs_exact(kind: str) -> None:
    if not onednn.are_exact(kind):
        pytest.skip(f"this processor has no exact integer convolution ({kind})")


def of_groups(groups: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if not groups:
        return nn.Sequential(nn.Linear(64, 48)), torch.randn(400, 64)
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=groups)), torch.randn(8, 64, 56, 56)


@pytest.mark.parametrize("groups", [0, 1, 4, 64])
def test_what_pays_runs_on_integers_unless_float_is_asked_for(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ from the float product by rounding only; without groups it is a linear layer."""
    needs_exact({4: "grouped", 64: "depthwise"}.get(groups, "dense"))
    model, x = of_groups(groups)
    quantized, calls = prepared(model, x), []
    original = onednn.convolution
    monkeypatch.setattr(onednn, "convolution", lambda *given: calls.append(given[-1]) or original(*given))
    with float_products():
        in_float = quantized(x)
    assert calls == []
    in_integers = quantized(x)
    assert calls == [groups or 1]
    assert torch.allclose(in_float, in_integers, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("wrong", ["grouped", "depthwise"])
def test_a_kind_that_is_wrong_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_exact("dense")
    onednn._are_exact.cache_clear()  # it has been tried just now
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
    ("shape", "weight", "groups", "zero", "fact"),  # None: integers pay
    [
        ((16, 64, 28, 28), (64, 64, 3, 3), 1, 0.0, None),
        ((16, 64, 28, 28), (64, 16, 3, 3), 4, 0.0, None),
        ((16, 16, 28, 28), (16, 2, 3, 3), 8, 0.0, "fewer than 32 products, here 18"),
        ((8, 3, 16, 16), (8, 3, 1, 1), 1, 0.0, "fewer than 16 products, here 3"),
        ((1, 64, 14, 14), (64, 16, 3, 3), 4, 0.0, "fewer than 131072 elements, here 12544"),
        ((16, 96, 56, 56), (96, 1, 3, 3), 96, 0.0, None),
        ((16, 96, 28, 28), (96, 1, 3, 3), 96, 0.0, None),
        ((16, 96, 28, 28), (96, 1, 3, 3), 96, 9.0, "fewer than 1572864 elements, here 1204224"),  # packing is dearer
        ((16, 192, 14, 14), (192, 1, 3, 3), 192, 0.0, "fewer than 1048576 elements, here 602112"),
        # sums could leave int32: 2^31 / (255 * 127) = 66,312
        ((4096, 1 << 16), (8, 1 << 16), 1, 0.0, None),
        ((4096, 66_000), (8, 66_000), 1, 0.0, "it sums 66000 products, and int32 holds 65536"),
        ((2, 7000, 64, 64), (8, 7000, 3, 3), 1, 0.0, None),
        ((2, 7400, 64, 64), (8, 7400, 3, 3), 1, 0.0, "it sums 66600 products, and int32 holds 65536"),
        # exact on some processors where the self-test is, not on all
        ((16, 96, 56, 56), (192, 1, 7, 7), 96, 0.0, "depthwise with several outputs"),
        ((8, 3, 160), (8, 3, 9), 1, 0.0, "Conv2d, and it has 1 axes"),
    ],
)
def test_when_integers_pay(shape, weight, groups, zero, fact):
    geometry = Geometry(*([1] * (len(shape) - 2) for _ in range(3)), groups)  # type: ignore[call-arg, arg-type]
    found = geometry.integers_refusal(torch.Size(shape), torch.Size(weight), zero)
    assert found is None if fact is None else found is not None and fact in found


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


def test_a_geometry_knows_where_integer_convolutions_err() -> None:
    """Windows in padding alone, and one column; all others are exact, where this processor is."""
    erred, exact = 0, onednn.is_exact_natively()
    sizes = itertools.product((1, 2, 5), (1, 2, 3), (1, 2), (0, 1, 2, 4), (1, 2, 3), (1, 2, 16))
    for size, kernel, step, pad, spread, channels in sizes:
        if size + 2 * pad < spread * (kernel - 1) + 1:
            continue
        geometry, x = Geometry([1, step], [0, pad], [1, spread], 1), torch.ones(2, channels, 3, size)
        weight = torch.ones(4, channels, 2, kernel)
        there = geometry.multiply(x, weight, None)
        column = there.shape[3] == 1 and kernel > 1 and step > 1
        wrong = geometry.onednn_fault(x.shape, weight.shape)
        assert (wrong is not None) == (column or bool((there == 0).any())), (size, kernel, geometry)
        erred += wrong is not None
        if exact and wrong is None:
            codes = torch.randint(0, 256, x.shape, dtype=torch.uint8)
            weight = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
            sums = onednn.convolution(codes, 1.0, 3.0, weight, torch.ones(4), None, *geometry)
            assert torch.equal(sums.double(), geometry.multiply(codes.double() - 3, weight.double(), None))
    assert erred


@pytest.mark.parametrize("kernel", [(3, 5), (1, 1), (2, 3), (3, 2)])
def test_padding_words_become_numbers_where_they_are_any(kernel: tuple[int, int]) -> None:
    x, weight = torch.randn(2, 3, 7, 9), torch.randn(4, 3, *kernel)
    for word in ("same", "valid"):
        geometry = Geometry.of(2, 1, word, (2, 1), kernel=kernel)
        assert (geometry is None) == (word == "same" and kernel == (3, 2))  # a pixel more on one side
        if geometry is not None:
            expected = F.conv2d(x, weight, padding=word, dilation=(2, 1))
            torch.testing.assert_close(geometry.multiply(x, weight, None), expected, rtol=0, atol=1e-5)
    assert Geometry.of(2, padding="same") is None  # whose kernel is not known
