"""QAT_PROCESSOR: this machine as the other kind of processor, with the numbers and strides that the other one has."""

import logging
from typing import Any

import pytest
import torch

from qat.kernels.cpu import onednn, processor
from tests.references.processors import untried

__all__ = ["untried"]  # a fixture

GEOMETRIES = {
    # images, input channels, output channels, groups, kernel, stride, height, width
    "dense": (2, 7, 12, 1, 3, 1, 9, 9),
    "grouped": (2, 12, 8, 4, 3, 2, 5, 6),
    "grouped, odd": (3, 15, 21, 3, 5, 2, 13, 11),
    "grouped 1x1": (3, 66, 34, 2, 1, 1, 13, 11),
    "depthwise": (1, 96, 96, 96, 3, 1, 9, 9),
    "rows": (1, 64, 48, 1, 1, 1, 40, 1),
    "one pixel": (3, 16, 4, 1, 1, 1, 1, 1),
    "one channel": (1, 16, 1, 1, 1, 1, 5, 5),
}


def operands(name: str, zero: float, biased: bool) -> tuple[Any, ...]:
    images, inputs, outputs, groups, kernel, stride, height, width = GEOMETRIES[name]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (images, inputs, height, width), dtype=torch.uint8, generator=generator)
    shape = (outputs, inputs // groups, kernel, kernel)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    codes[0], weight[0], weight[-1] = 255, 127, -127
    steps, bias = torch.rand(outputs, generator=generator) / 100, torch.randn(outputs, generator=generator)
    geometry = ([stride] * 2, [kernel // 2] * 2, [1 + (stride == 1)] * 2, groups)
    return codes, 0.0123, zero, weight, steps, bias if biased else None, *geometry


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("zero", [0.0, 7.0, 255.0])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_emulation_is_what_onednn_returns(name: str, zero: float, biased: bool) -> None:
    emulated = onednn._emulated_convolution(*operands(name, zero, biased))
    assert emulated.is_contiguous(memory_format=torch.channels_last)
    if onednn.is_exact_natively():  # elsewhere there is nothing to hold it against
        codes, step, _, weight, steps, *rest = operands(name, zero, biased)
        real = onednn._convolution(codes, step, zero, weight, steps, *rest)
        # With AMX, most kernels of oneDNN scale once, by the product of both steps.
        scaled_once = onednn._emulated_convolution(codes, 1.0, zero, weight, steps * step, *rest)
        assert any(torch.equal(each, real) for each in (emulated, scaled_once)) and emulated.stride() == real.stride()


@pytest.mark.parametrize("asked", ["vnni", "no-vnni"])
def test_each_kind_can_be_asked_for(asked, untried, monkeypatch, caplog):
    monkeypatch.setenv(processor.VARIABLE, asked)
    with caplog.at_level(logging.INFO, "qat.kernels"):
        found = {kind: onednn.are_exact(kind) for kind in onednn.KINDS}
    assert set(found.values()) == {asked == "vnni"}
    said = {"no-vnni": ["QAT_PROCESSOR=no-vnni: training multiplies in float on the same grids"]}
    emulated = ["QAT_PROCESSOR=vnni, and this processor has none: integer products are emulated, slowly"]
    assert caplog.messages == said.get(asked, [] if onednn.is_exact_natively() else emulated)


def test_without_vnni_one_calm_line_says_so(untried, monkeypatch, caplog):
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    exact = onednn._emulated_convolution
    monkeypatch.setattr(onednn, "_convolution", lambda *given: exact(*given).clamp(-30000, 30000))
    with caplog.at_level(logging.INFO, "qat.kernels"):
        assert {False} == set(map(onednn.are_exact, reversed(onednn.KINDS)))
    assert caplog.messages == ["no VNNI: training multiplies in float on the same grids"]


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, "avx2")
    with pytest.raises(ValueError, match=r"^QAT_PROCESSOR must be vnni, no-vnni or unset, got 'avx2'$"):
        processor.asked_for()
