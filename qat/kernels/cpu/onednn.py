"""Products of uint8 by int8 codes through oneDNN, exact on processors with VNNI.

Elsewhere these torch operators silently return wrong values (sums saturate at 16 bits). So they are tried on extreme
integers first, and never used if one sum is off. `qat.kernels.cpu.processor` can ask for the other kind of processor:
the products are then emulated, or not used.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qat.kernels.cpu import processor
from qat.torch_internals import onednn_matmul

log = logging.getLogger("qat.kernels")


def convolution(
    codes: Tensor, step: float, zero: float, weight: Tensor, steps: Tensor, bias: Tensor | None, *geometry: object
) -> Tensor:
    """Return conv((codes - zero) * step, weight * steps) + bias in float32.

    Shapes: codes uint8, (N, C, H, W); weight int8, (O, C / groups, kh, kw); steps and bias (O,). The geometry is that
    of torch: stride, padding, dilation and groups. The sums are in int32.
    """
    multiply = _emulated_convolution if is_emulated() else _convolution
    return multiply(codes, step, zero, weight, steps, bias, *geometry)


def _convolution(
    codes: Tensor, step: float, zero: float, weight: Tensor, steps: Tensor, bias: Tensor | None, *geometry: object
) -> Tensor:
    ops, point = torch.ops.onednn, int(zero)
    zeros = torch.zeros(steps.numel(), dtype=torch.int32)
    # Packing does not use the scales, but would read them one by one: it gets a single one.
    packed = ops.qconv_prepack(weight, torch.ones(1, dtype=torch.float32), step, point, *geometry, None)
    y: Tensor = ops.qconv_pointwise.default(  # naming the overload saves 10 microseconds
        codes, step, point, packed, steps, zeros, bias, *geometry, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def _emulated_convolution(
    codes: Tensor, step: float, zero: float, weight: Tensor, steps: Tensor, bias: Tensor | None, *geometry: Any
) -> Tensor:
    # To the bit and in the strides of oneDNN with VNNI and without AMX: the sums are exact in float64, then rounded to
    # float32 and scaled by one step after the other.
    sums = torch.nn.functional.conv2d(codes.double() - int(zero), weight.double(), None, *geometry)
    y = torch.empty(sums.shape, dtype=torch.float32, memory_format=torch.channels_last).copy_(sums)
    y.mul_(torch.tensor(step, dtype=torch.float32)).mul_(steps.view(-1, 1, 1))
    return y if bias is None else y.add_(bias.view(-1, 1, 1))


def linear(codes: Tensor, step: float, zero: float, weight: Tensor, steps: Tensor, bias: Tensor | None) -> Tensor:
    """Return ((codes - zero) * step) @ (weight * steps).T + bias, summed in int32.

    Shapes: codes uint8, (..., inputs); weight int8, (outputs, inputs); steps and bias (outputs,).
    """
    # As a 1x1 convolution over an image of one column: its weight packs four times as fast as a matrix.
    rows = codes.reshape(1, -1, 1, codes.shape[-1]).permute(0, 3, 1, 2)
    y = convolution(rows, step, zero, weight[:, :, None, None], steps, bias, [1, 1], [0, 0], [1, 1], 1)
    return y.permute(0, 2, 3, 1).reshape(*codes.shape[:-1], steps.numel())


class PackedWeight:
    """An int8 weight, packed once for exact int32 sums with codes, given in float32.

    Args:
        weight: int8, (O, C / groups, kh, kw), or (O, I) of a linear layer.
        zero: subtracted from the codes.
        geometry: stride, padding, dilation and groups of torch's convolution; () for a linear layer.
    """

    def __init__(self, weight: Tensor, zero: int, *geometry: object) -> None:
        self.zero, self.geometry, ops = zero, geometry, torch.ops.onednn
        self.steps, self.zeros = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int32)
        if geometry:
            self.packed = ops.qconv_prepack(weight, torch.ones(1), 1.0, zero, *geometry, None)
        else:
            self.packed = ops.qlinear_prepack(weight, None)

    def sums(self, codes: Tensor) -> Tensor:
        """Return the sums for codes (N, C, H, W) in channels_last, or (..., I)."""
        given = (codes, 1.0, self.zero, self.packed, self.steps, self.zeros, None)
        after: tuple[object, ...] = (1.0, 0, torch.float32, "none", [], "")
        if self.geometry:
            y: Tensor = torch.ops.onednn.qconv_pointwise.default(*given, *self.geometry, *after)
            return y
        product = torch.ops.onednn.qlinear_pointwise.default
        rows: Tensor = product(codes.reshape(-1, codes.shape[-1]), *given[1:], *after)
        return rows.view(*codes.shape[:-1], len(self.steps))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T of two float32 matrices, by oneDNN if torch has it."""
    return onednn_matmul(a, b) if _has_float_product() else a @ b.T  # which takes a fifth to a third longer


@functools.cache
def _has_float_product() -> bool:
    try:
        a, b = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(2, 4)
        return torch.equal(onednn_matmul(a, b), a @ b.T)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):  # a torch without oneDNN
        return False


KINDS = {"dense": 1, "grouped": 6, "depthwise": 96}
"""Kinds of convolutions for oneDNN, and the groups of a test on 96 channels."""


def are_exact(kind: str) -> bool:
    """Return True if integer products are exact here, and QAT_PROCESSOR allows them."""
    return _are_exact(kind, processor.asked_for())


@functools.cache
def _are_exact(kind: str, asked: processor.Processor | None) -> bool:
    if kind != "dense" and not _are_exact("dense", asked):  # to which matrix products belong: then none is used
        return False
    if asked == "no-vnni":
        _say("QAT_PROCESSOR=no-vnni: training multiplies in float on the same grids")
        return False
    if is_emulated():
        _say("QAT_PROCESSOR=vnni, and this processor has none: integer products are emulated, slowly")
    try:
        exact = _convolves_exactly(convolution, KINDS[kind]) and (kind != "dense" or _multiplies_exactly())
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # a torch without oneDNN, another processor
        reason = str(error).splitlines()[0]
        _say(f"torch has no integer products here ({reason}): training multiplies in float on the same grids")
        return False
    if not exact and kind == "dense":
        _say("no VNNI: training multiplies in float on the same grids")
    elif not exact:
        _say(f"{kind} integer convolutions are not exact on this processor: they multiply in float on the same grids")
    return exact


@functools.cache
def _say(line: str) -> None:
    log.info(line)


@functools.cache
def is_exact_natively() -> bool:
    """Return True if oneDNN's integer products of every kind are exact here."""
    try:
        return all(_convolves_exactly(_convolution, groups) for groups in KINDS.values())
    except (RuntimeError, AttributeError, NotImplementedError):  # a torch without oneDNN, another processor
        return False


def is_emulated() -> bool:
    """Return True if QAT_PROCESSOR asks for VNNI and this machine lacks it."""
    return processor.asked_for() == "vnni" and not is_exact_natively()


def _example(groups: int) -> tuple[Tensor, Tensor]:
    # Pairs of products have a sum that exceeds 16 bits.
    # On the CPU, whatever the default device is.
    draw = functools.partial(torch.randint, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    codes = draw(0, 256, (2, 96, 9, 9), dtype=torch.uint8)
    weight = draw(-127, 128, (96, 96 // groups, 3, 3), dtype=torch.int8)
    codes[0], weight[:4], weight[4:8] = 255, 127, -127  # the extremes, which saturate first
    return codes, weight


def _convolves_exactly(convolve: Callable[..., Tensor], groups: int) -> bool:
    codes, weight = _example(groups)
    steps = torch.exp2((torch.arange(96) % 5 - 2).to(torch.float32))  # scaling by powers of two is exact
    expected = torch.nn.functional.conv2d(codes.double() - 3, weight.double(), padding=1, groups=groups)
    got = convolve(codes, 0.5, 3.0, weight, steps, None, [1, 1], [1, 1], [1, 1], groups)
    return bool(torch.equal(got.double(), expected * steps.double().view(-1, 1, 1) * 0.5))


def _multiplies_exactly() -> bool:
    codes, weight = _example(1)
    rows, square = codes.flatten(2).mT.reshape(-1, 96), weight[:, :, 0, 0].contiguous()
    got = linear(rows.contiguous(), 1.0, 3.0, square, torch.ones(96, dtype=torch.float32), None)
    return bool(torch.equal(got.double(), (rows.double() - 3) @ square.double().T))
