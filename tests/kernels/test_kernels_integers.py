"""Evaluation on codes in C: the bytes that torch's operations compute, for every layout and length."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qat.codes.evaluation import arithmetic
from qat.codes.evaluation.arithmetic import CodeGrid
from qat.kernels import plain_formulas
from qat.kernels.cpu.compiler import library

pytestmark = pytest.mark.skipif(library() is None, reason="without the C kernels there are formulas only")

SHAPES = [(2, 5, 3, 3), (3, 24, 7, 5), (1, 96, 9, 4), (2, 700, 2, 3), (3, 1, 6, 6)]
A, B = CodeGrid(0.11, 7.0, 0.0, 255.0), CodeGrid(0.013, 128.0, 1.0, 255.0)
TO = CodeGrid(0.27, 31.0, 0.0, 200.0)
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same(call: Callable[[], Tensor]) -> bool:
    with plain_formulas():
        expected = call()
    return torch.equal(call(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_products_of_codes(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    a = codes(*shape).to(memory_format=layout)
    for other in (shape, (*shape[:2], 1, 1), (1, *shape[1:]), (1, shape[1], 1, 1)):
        b = codes(*other, seed=1).to(memory_format=layout)
        for clip in ((0.0, 3.0), (float("-inf"), float("inf"))):
            assert same(lambda b=b, clip=clip: arithmetic.add(a, b, (A, B), TO, clip))  # type: ignore[misc]
            assert same(lambda b=b, clip=clip: arithmetic.multiply(a, b, (A, B), TO, clip))  # type: ignore[misc]
            assert same(lambda b=b, clip=clip: arithmetic.multiply(b, a, (B, A), TO, clip))  # type: ignore[misc]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 5000])
def test_tables(length: int) -> None:
    x, table = codes(length), codes(256, seed=1)
    assert torch.equal(arithmetic.look_up(x, table), table[x.long()])
    assert same(lambda: arithmetic.look_up(x[::2], table))


@pytest.mark.parametrize("to", [TO, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_follows_sums(shape: tuple[int, ...], to: CodeGrid | None) -> None:
    sums = (codes(*shape).float() - 128).mul(100).to(memory_format=torch.channels_last)
    bias, scale = codes(shape[1], seed=1).float(), (codes(shape[1], seed=2) + 1.0) * 1e-5
    tables = [None] if to is None else [None, codes(256, seed=3), codes(256, seed=3).float()]
    for table in tables:
        assert same(lambda table=table: arithmetic.requantize(sums, bias, scale, 1, (-2.0, 6.0), to, table))  # type: ignore[misc]
    assert to is None or same(lambda: arithmetic.requantize(sums, bias, scale, 1, to=to, kind=torch.float32))
    rows = sums.permute(0, 2, 3, 1)
    assert same(lambda: arithmetic.requantize(rows, bias, scale, 3, (-2.0, 6.0), to))
