"""What the C kernels read and write is what they were promised: sizes, dtypes and strides are checked at one place."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qat.codes.operators.add import add_quantize
from qat.codes.operators.norm import batch_statistics, norm_quantize, norm_quantize_backward, statistics
from qat.codes.operators.pool import max_pool_codes, max_pool_codes_backward
from qat.codes.operators.product import codes_product
from qat.codes.operators.quantize import quantize_codes
from qat.kernels.cpu import compiler
from qat.kernels.cpu.addresses import elements_at, numbers_at, rows_at
from qat.kernels.cpu.quantizers import quantize_rows

ROOT = Path(__file__).resolve().parents[2]
needs_kernels = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
SCALE, SMALLEST = torch.tensor(0.02), torch.tensor(0.01)
LEVELS = [-128.0, 127.0, 128.0, 1.0, 0.0]
GRID = ([SCALE, SMALLEST, None], LEVELS)


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype)


def test_no_other_file_asks_for_an_address() -> None:
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "qat").rglob("*.py")
        if re.search(r"(?<!untyped_storage\(\))\.data_ptr\b", path.read_text())
    }
    assert asking == {"qat/kernels/cpu/addresses.py"}


X = numbered(8)
WRONG_NUMBERS = [X.double(), X[:4], X[:1].expand(8), X.to("meta")]


@pytest.mark.parametrize("wrong", WRONG_NUMBERS, ids=str)
def test_numbers_are_as_many_as_promised_and_of_the_type(wrong: Tensor) -> None:
    assert numbers_at("mean", X, 8) == X.data_ptr()
    found = f"{tuple(wrong.shape)} of {wrong.dtype} on {wrong.device} with strides {wrong.stride()}"
    with pytest.raises(ValueError, match=rf"^mean should be 8 numbers of torch\.float32 .* not {re.escape(found)}$"):
        numbers_at("mean", wrong, 8)


@pytest.mark.parametrize("ask", [lambda x: numbers_at("scale", x, 8), lambda x: elements_at("scale", x, x)])
def test_a_tensor_without_memory_is_refused(ask: Callable[[Tensor], int]) -> None:
    x = numbered(8)
    x.untyped_storage().resize_(0)  # as FSDP does between two uses of a parameter
    with pytest.raises(ValueError, match="its memory given back"):
        ask(x)


def test_elements_lie_as_the_pattern_does() -> None:
    x = numbered(2, 3, 4, 5)
    nearest = x.to(memory_format=torch.channels_last)
    for each in (x, nearest, x.mT, x.permute(3, 1, 0, 2)):
        assert elements_at("x", each, each) == each.data_ptr()
        assert elements_at("y", torch.empty_like(each), each)
    for each, pattern in [(x, nearest), (x[:, :2], x), (x, x[:, :2]), (x[..., ::2], x[..., ::2]), (x.int(), x)]:
        facts = (f"x should be {tuple(pattern.shape)}", f"strides {pattern.stride()}, not {tuple(each.shape)}")
        with pytest.raises(ValueError, match=".*".join(map(re.escape, facts))):
            elements_at("x", each, pattern)


def test_rows_lie_one_after_the_other() -> None:
    x = numbered(4, 6)
    assert rows_at("weight", x, 4) and rows_at("weight", x.T, 1)
    with pytest.raises(ValueError, match=r"weight should be 6 rows.* not \(6, 4\)"):
        rows_at("weight", x.T, 6)


@needs_kernels
def test_every_operator_checks_what_it_is_given() -> None:
    y, channels, codes = numbered(2, 8, 3, 3), numbered(8), torch.zeros(2, 8, 3, 3, dtype=torch.uint8)
    four, numbers = numbered(4), torch.tensor([0.1, 3.0])
    norm = [channels, channels, channels, channels]
    window, clip, weight = [2, 2, 1, 1, 0, 0, 1, 1, 0], [0.0, 6.0], numbered(4, 8, 1, 1)
    calls = [
        lambda: statistics(y, 1e-5, (four, channels), 0.1),
        lambda: statistics(y, 1e-5, (channels, four[:1].expand(8)), 0.1),
        lambda: statistics(y, 1e-5, (channels, channels.double()), 0.1),
        lambda: batch_statistics(y.double(), 1e-5),
        *[
            lambda place=place: norm_quantize(y, [*norm[:place], four, *norm[place + 1 :]], clip, *GRID)
            for place in range(4)
        ],
        lambda: norm_quantize_backward(y, y, [four, *norm[1:]], clip, *GRID, True, True),
        lambda: quantize_codes(y, [four, SMALLEST, None], LEVELS),
        lambda: quantize_codes(y, [SCALE, four[:0], None], LEVELS),
        lambda: quantize_codes(y, [SCALE, SMALLEST, torch.tensor(3)], LEVELS),
        lambda: quantize_codes(y[..., :2], *GRID),
        lambda: add_quantize(codes, codes[:1], numbers, numbers, clip, *GRID),
        lambda: add_quantize(codes, codes, numbers, numbers[:1], clip, *GRID),
        lambda: quantize_rows(y, channels[:2], -8, 7, four, values=y.clone()),
        lambda: quantize_rows(y, channels[:2], -8, 7, values=y.half()),
        lambda: max_pool_codes(codes.float(), window),
        lambda: max_pool_codes_backward(y, codes, 3, 3, window[:6]),
        lambda: max_pool_codes_backward(y, codes, 3, 3, [2, 2, 0, 1, *window[4:]]),
        lambda: codes_product(codes, numbers, weight, [four, four[:2], None], LEVELS, None, [1, 1, 0, 0, 1, 1, 1], 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^[^.]+ (should be|takes) .*, not |shorter than argument"):
            call()
