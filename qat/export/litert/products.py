"""Convolutions, linear layers and matrix products."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qat.export.litert.file import FLOAT, HIGHEST, LOWEST, Array, Grid, Option
from qat.export.litert.values import Axes, Coded, Pending, Shape, UnwritableError, Weight, Writer, layout, stored_sizes

SAME, VALID = 0, 1
"""The schema's numbers."""

LARGEST_BIAS = 2**30


def convolution(
    writer: Writer, shape: Shape, x: object, weight: object, bias: object = None, stride: Sequence[int] = (1, 1),
    padding: Sequence[int] | str = (0, 0), dilation: Sequence[int] = (1, 1), groups: int = 1,
) -> Pending:  # fmt: skip
    """Write CONV_2D, or DEPTHWISE_CONV_2D if every input channel is a group."""
    x, weight, bias = _operands(writer, x, weight, bias)
    channels = x.axes.shape[1]
    depthwise = groups == channels and groups > 1
    order, axis = ((1, 2, 3, 0), 3) if depthwise else ((0, 2, 3, 1), 0)
    kernel = weight.codes.shape[2:]
    steps, spread = pair(stride), pair(dilation)
    if padding == "same":
        padding = [(window - 1) * each // 2 for window, each in zip(kernel, spread, strict=True)]
    before = [0, 0] if isinstance(padding, str) else pair(padding)

    def emit(grid: Grid, low: float, high: float) -> Coded:
        source, how = padded(writer, x, shape[2:], kernel, steps, spread, before)
        options: dict[str, Option] = {
            "padding": how, "strideH": steps[0], "strideW": steps[1],
            "dilationHFactor": spread[0], "dilationWFactor": spread[1],
        }  # fmt: skip
        if depthwise:
            options["depthMultiplier"] = weight.codes.shape[0] // channels
        inputs = [source, *_parameters(writer, weight, weight.codes.permute(order), axis, bias, grid)]
        kind = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
        return writer.result(kind, inputs, shape, grid, (low, high), fuses=True, **options)

    return Pending(emit, "a convolution")


def transposed_convolution(
    writer: Writer, shape: Shape, x: object, weight: object, bias: object = None, stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0), _: object = None, groups: int = 1, dilation: Sequence[int] = (1, 1),
) -> Pending:  # fmt: skip
    """Write TRANSPOSE_CONV, and a STRIDED_SLICE if torch's margins differ."""
    if groups != 1 or any(each != 1 for each in dilation):
        raise UnwritableError("LiteRT's TRANSPOSE_CONV has neither groups nor dilation")
    x, weight, bias = _operands(writer, x, weight, bias)
    steps, first, kernel = pair(stride), pair(padding), weight.codes.shape[2:]
    sizes = list(zip(x.axes.shape[2:], shape[2:], steps, first, kernel, strict=True))
    same = all(fit == size * step and before == max(k - step, 0) // 2 for size, fit, step, before, k in sizes)
    full = [max((size - 1) * step + k, fit + before) for size, fit, step, before, k in sizes]
    wide = shape if same else (*shape[:2], *full)

    def emit(grid: Grid, low: float, high: float) -> Coded:
        codes, biases = _parameters(writer, weight, weight.codes.permute(1, 2, 3, 0), 0, bias, grid)
        inputs = [writer.numbers(stored_sizes(wide)), codes, writer.stored(x), biases]
        how = SAME if same else VALID
        found = writer.result(
            "TRANSPOSE_CONV", inputs, wide, grid, (low, high), padding=how, strideH=steps[0], strideW=steps[1]
        )
        return writer.sliced(found, shape, {k + 2: slice(first[k], first[k] + shape[k + 2]) for k in (0, 1)})

    return Pending(emit, "a transposed convolution")


def linear(writer: Writer, shape: Shape, x: object, weight: object, bias: object = None) -> Pending:
    """Write FULLY_CONNECTED; columns for a flattened image follow its stored order."""
    x, weight, bias = _operands(writer, x, weight, bias)
    if len(shape) == 4:
        raise UnwritableError("a linear layer over four axes is not written; merge the first ones with a view")
    parts, codes = x.axes.dims[-1], weight.codes  # torch flattens NCHW, and the file stores NHWC
    order = [*x.axes.order(range(len(shape) - 1)), *sorted(parts)]
    if order == sorted(order):
        sizes = [x.axes.sizes[part] for part in parts]
        columns = torch.arange(codes.shape[1]).reshape(sizes).permute([parts.index(part) for part in sorted(parts)])
        codes = codes[:, columns.reshape(-1)]
        x = Coded(x.tensor, Axes(x.axes.sizes, (*x.axes.dims[:-1], tuple(sorted(parts)))), x.grid)

    def emit(grid: Grid, low: float, high: float) -> Coded:
        inputs = [writer.stored(x), *_parameters(writer, weight, codes, 0, bias, grid)]
        kept = len(shape) > 2
        return writer.result("FULLY_CONNECTED", inputs, shape, grid, (low, high), fuses=True, keepNumDims=kept)

    return Pending(emit, "a linear layer")


def matmul(writer: Writer, shape: Shape, a: object, b: object) -> Pending:
    """Write BATCH_MATMUL."""
    first, second = (writer.coded(each, "a matrix product") for each in (a, b))
    if not len(first.axes.dims) == len(second.axes.dims) != 4:
        raise UnwritableError("a matrix product of four axes, or of different numbers of them, is not written")

    def emit(grid: Grid, low: float, high: float) -> Coded:
        return writer.result("BATCH_MATMUL", [writer.stored(first), writer.stored(second)], shape, grid, (low, high))

    return Pending(emit, "a matrix product")


def padded(
    writer: Writer, x: Coded, out: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], before: Sequence[int], code: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Return the images for `out` windows along both axes, and LiteRT's padding.

    LiteRT's SAME puts the smaller margin first. Where torch's margins differ, a PAD comes before, with the integer
    `code`; None: the one that stands for 0.
    """
    margins, same = [], True
    for size, fit, window, step, spread, first in zip(
        x.axes.shape[2:], out, kernel, stride, dilation, before, strict=True
    ):
        needed = max((fit - 1) * step + (window - 1) * spread + 1 - size, 0)
        margins.append((first, max(needed - first, 0)))
        same &= fit == math.ceil(size / step) and first == needed // 2
    if same or not any(map(any, margins)):
        return writer.stored(x), SAME if any(map(any, margins)) else VALID
    return pad(writer, x, [(0, 0), *margins, (0, 0)], code).tensor, VALID


def pad(writer: Writer, x: Coded, margins: Sequence[tuple[int, int]], code: int | None = None) -> Coded:
    """Write PAD with the integer of 0, or PADV2; margins follow the stored axes."""
    tensor, rank = writer.stored(x), len(x.axes.dims)
    sizes = [size + sum(margin) for size, margin in zip(writer.file.shapes[tensor], margins, strict=True)]
    shape = [sizes[layout(rank).index(axis)] for axis in range(rank)]
    inputs = [tensor, writer.numbers(margins)]
    if code in (None, x.grid.zero_point):
        return writer.result("PAD", inputs, shape, x.grid)
    inputs.append(writer.file.constant("margin", np.array([code], np.int8), x.grid))
    return writer.result("PADV2", inputs, shape, x.grid)


def pair(values: Sequence[int]) -> list[int]:
    """Return two numbers, of one for both axes or of one for each."""
    return list(values) * (2 // len(values))


def _operands(writer: Writer, x: object, weight: object, bias: object) -> tuple[Coded, Weight, Weight]:
    if not isinstance(weight, Weight) or not isinstance(bias, Weight):
        raise UnwritableError("it has a weight or a bias that lies on no grid; quantize it with qat.prepare")
    return writer.coded(x, "a layer"), weight, bias


def _parameters(writer: Writer, weight: Weight, codes: Tensor, axis: int, bias: Weight, grid: Grid) -> list[int]:
    # The constants of a weight and a bias, for a result on this grid. Integers of few bits are stored as multiples by a
    # power of two, of a scale that is as much smaller: the kernels that compute in fixed point round a sum twice, the
    # first time to its unit.
    scales, sums, name = weight.scale.reshape(-1), bias.codes.long(), weight.layer or "weight"
    if grid is FLOAT:
        floats = codes * scales.reshape([-1 if each == axis else 1 for each in range(codes.dim())])
        named = {name: floats, f"{name}.bias": sums * bias.scale.reshape(-1)}
        return [writer.file.constant(key, np.ascontiguousarray(each.numpy())) for key, each in named.items()]
    values: Array = np.ascontiguousarray(codes.numpy().astype(np.int8))
    packed = writer.four_bits and bool(values.min() >= LOWEST // 16 and values.max() < -LOWEST // 16)
    factor = 1 if packed else headroom(codes, sums)  # 4 bits have no room
    steps, wide = bias.scale.reshape(-1) / factor, (sums * factor).numpy().astype(np.int32)
    if codes.dim() == 2 and len(set(scales.tolist())) == 1:  # old runtimes take no list of a linear layer
        scales, steps = scales[:1], steps[:1]
    channels = ((scales / factor).tolist(), axis)
    return [
        writer.file.constant(name, values * np.int8(factor), channels=channels, packed=packed),
        writer.file.constant(f"{name}.bias", wide, channels=(steps.tolist(), 0)),
    ]


def headroom(weight: Tensor, bias: Tensor) -> int:
    """Return the largest power of two that int8 weights and bias can be multiplied by.

    A sum that is rounded twice, the first time to its unit, then loses nothing the first time.
    """
    factor, weight_size, bias_size = 1, max(int(weight.int().abs().max()), 1), int(bias.long().abs().max())
    while 2 * factor * weight_size <= HIGHEST and 2 * factor * bias_size <= LARGEST_BIAS:
        factor *= 2
    return factor
