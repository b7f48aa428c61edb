"""Operations between layers: sums, averages, activations, moves of integers.

Every handler takes the writer, the shape of the result in torch, and the arguments of the call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from qat.export.litert.file import FLOAT, HIGHEST, LOWEST, Grid
from qat.export.litert.products import VALID, pad, padded, pair
from qat.export.litert.values import ANY, Axes, Coded, Pending, Shape, UnwritableError, Weight, Writer, layout

Result = Coded | Pending
Handler = Callable[..., Result]

PROBABILITIES, ANGLES = (1 / 256, LOWEST), (1 / 128, 0)
"""Scale and zero point that LiteRT's kernels prescribe for sigmoid and softmax, and for tanh."""


def binary(kind: str) -> Handler:
    """Return the handler of ADD, SUB or MUL of tensors and numbers, on any grids."""

    def handler(writer: Writer, shape: Shape, a: object, b: object, alpha: float = 1) -> Pending:
        if alpha != 1:
            raise UnwritableError(f"{kind} with alpha={alpha} is not written; multiply first")
        wide = _as_wide(writer, shape, kind, (a, b))

        def emit(grid: Grid, low: float, high: float) -> Coded:
            inputs = [writer.stored(each) for each in wide]
            return writer.result(kind, inputs, shape, grid, (low, high), fuses=True)

        return Pending(emit, kind)

    return handler


def _as_wide(writer: Writer, shape: Shape, operation: str, operands: Sequence[object]) -> list[Coded]:
    read = [writer.coded(each, operation) for each in operands]
    ones = [(1,) * (len(shape) - len(each.axes.dims)) for each in read]
    return [moved(x, front + x.axes.shape, writer) if x.axes.sizes else x for x, front in zip(read, ones, strict=True)]


def extreme(kind: str) -> Handler:
    """Return the handler of MAXIMUM or MINIMUM."""
    return lambda writer, shape, *operands: _joined(writer, shape, kind, _as_wide(writer, shape, kind, operands))


def leaky_relu(writer: Writer, shape: Shape, x: object, slope: float = 0.01) -> Pending:
    """Write max(x, slope * x), or the smaller one for a slope above 1."""
    x = writer.coded(x, "a leaky ReLU")

    def emit(grid: Grid, low: float, high: float) -> Coded:
        if grid is FLOAT:
            return writer.result("LEAKY_RELU", [writer.stored(x)], shape, grid, (low, high), alpha=slope)
        # XNNPACK's own LEAKY_RELU keeps 8 bits of its factors.
        both = [writer.requantized(x, grid, factor=each).tensor for each in (1.0, slope)]
        made = writer.file.tensor(f"leaky_{both[1]}", writer.file.shapes[x.tensor], "INT8", grid)
        writer.file.operator("MAXIMUM" if slope <= 1 else "MINIMUM", both, [made])
        return writer.requantized(Coded(made, x.axes, grid), grid, (low, high))

    return Pending(emit, "a leaky ReLU")


def unary(kind: str, fixed: tuple[float, int] | None = None, **options: Any) -> Handler:
    """Return the handler of an activation; `fixed` is the only grid of its kernels."""

    def handler(writer: Writer, shape: Shape, x: object, *_: object) -> Pending:
        x = writer.coded(x, kind)

        def emit(grid: Grid, low: float, high: float) -> Coded:
            if fixed and grid is not FLOAT and (grid.scale, grid.zero_point) != fixed:
                raise UnwritableError(
                    f"LiteRT's {kind} has the scale 1/{1 / fixed[0]:g} and the zero point {fixed[1]}, not"
                    f" {grid.scale:.6g} and {grid.zero_point}"
                )
            return writer.result(kind, [writer.stored(x)], shape, grid, (low, high), **options)

        return Pending(emit, kind)

    return handler


def softmax(writer: Writer, shape: Shape, x: object, axis: int, *_: object) -> Result:
    """Write SOFTMAX over the last axis."""
    if layout(len(shape))[-1] != axis % len(shape):
        raise UnwritableError(f"LiteRT's SOFTMAX runs over the last stored axis only, not over axis {axis}")
    return unary("SOFTMAX", PROBABILITIES, beta=1.0)(writer, shape, x)


def hardsigmoid(writer: Writer, shape: Shape, x: object) -> Pending:
    """Write clamp(x / 6 + 1/2, 0, 1) as a depthwise convolution of one pixel."""
    x = writer.coded(x, "hardsigmoid")
    image = moved(x, (*shape, *(1,) * (4 - len(shape))), writer)
    channels = image.axes.shape[1]
    # x / 6 + 1/2 = (q * code + bias) * step with step = scale / (6 * code), so bias is 3 * code / scale. The bias is
    # rounded: take the code for which it is nearly whole.
    biases = {code: 3 * code / x.grid.scale for code in range(HIGHEST // 2, HIGHEST + 1)}
    code, bias = min(biases.items(), key=lambda each: abs(each[1] - round(each[1])))

    def emit(grid: Grid, low: float, high: float) -> Coded:
        if grid is FLOAT:
            raise UnwritableError("no quantizer follows a hardsigmoid")
        constants = _one_channel_each(writer, x.grid, (1, 1), channels, (code, 6), round(bias))
        made = writer.result(
            "DEPTHWISE_CONV_2D", [writer.stored(image), *constants], image.axes.shape, grid,
            (max(low, 0.0), min(high, 1.0)), fuses=True, padding=VALID, strideH=1, strideW=1, depthMultiplier=1,
        )  # fmt: skip
        return moved(made, shape, writer)

    return Pending(emit, "hardsigmoid")


def _one_channel_each(
    writer: Writer, grid: Grid, kernel: Sequence[int], channels: int, weight: tuple[int, int], bias: int
) -> list[int]:
    # Weight and bias of a depthwise convolution: every weight is code / (divisor * code), and the bias is in its steps.
    code, divisor = weight
    step = 1 / (divisor * code)
    codes, sums = np.full((1, *kernel, channels), code, np.int8), np.full(channels, bias, np.int32)
    return [
        writer.file.constant("equal_weights", codes, channels=([step] * channels, 3)),
        writer.file.constant("equal_biases", sums, channels=([grid.scale * step] * channels, 0)),
    ]


def clamp(writer: Writer, shape: Shape, x: object, low: float | None = None, high: float | None = None) -> Result:
    """Bound a result that waits for its grid, or integers."""
    bounds = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
    if isinstance(x, Pending):
        return Pending(x.emit, x.operation, max(x.low, bounds[0]), min(x.high, bounds[1]))
    x = coded = writer.coded(x, "a clamp")
    if all(map(x.grid.has_level, bounds)):
        return writer.requantized(x, x.grid, bounds)

    def emit(grid: Grid, low: float, high: float) -> Coded:
        if grid is FLOAT:
            raise UnwritableError("its bounds lie between the levels of its input")
        return writer.requantized(coded, grid, (low, high))

    return Pending(emit, "a clamp", *bounds)  # a bound between two levels is one of the next grid's


def mean(
    writer: Writer, shape: Shape, x: object, axes: Sequence[int] | None = None, *_: object, **__: object
) -> Result:
    """Write MEAN, onto any grid."""
    x = writer.coded(x, "a mean")
    before, rank = x.axes.shape, len(x.axes.dims)
    averaged = {axis % rank for axis in axes or range(rank)}
    if rank == 4 and averaged == {2, 3}:
        return view(writer, shape, average(writer, (*before[:2], 1, 1), x, before[2:]))  # of whole images
    stored = [place for place, axis in enumerate(layout(rank)) if axis in averaged]
    kept = tuple(1 if axis in averaged else size for axis, size in enumerate(before))

    def emit(grid: Grid, low: float, high: float) -> Coded:
        inputs = [writer.stored(x), writer.numbers(stored)]
        return moved(writer.result("MEAN", inputs, kept, grid, (low, high), keepDims=True), shape, writer)

    return Pending(emit, "a mean")


def adaptive_average(writer: Writer, shape: Shape, x: object, sizes: Sequence[int]) -> Pending:
    """Write AVERAGE_POOL_2D of equal windows; MEAN is off by up to 3/4 of a level."""
    x = writer.coded(x, "an average")
    both = [divmod(size, wanted) for size, wanted in zip(x.axes.shape[-2:], shape[-2:], strict=True)]
    if any(rest for _, rest in both):
        raise UnwritableError(f"adaptive pooling of {x.axes.shape[-2:]} to {sizes} has windows of several sizes")
    return average(writer, shape, x, [size for size, _ in both])


def average(
    writer: Writer, shape: Shape, x: object, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0), ceil: bool = False, count_margins: bool = True, divisor: int | None = None,
) -> Pending:  # fmt: skip
    """Write AVERAGE_POOL_2D, or onto another grid a DEPTHWISE_CONV_2D of ones."""
    x = writer.coded(x, "an average")
    if ceil or divisor or (any(padding) and not count_margins):
        raise UnwritableError("average pooling with ceil_mode, a divisor, or margins that do not count is not written")
    steps = list(stride or kernel)
    strides: dict[str, Any] = {"strideH": steps[0], "strideW": steps[1], "padding": VALID}

    def emit(grid: Grid, low: float, high: float) -> Coded:
        margins = [(0, 0), *((each, each) for each in padding), (0, 0)]
        tensor = writer.stored(pad(writer, x, margins) if any(padding) else x)
        if grid is FLOAT or (grid.scale, grid.zero_point) == (x.grid.scale, x.grid.zero_point):
            window: dict[str, Any] = {"filterHeight": kernel[0], "filterWidth": kernel[1], **strides}
            return writer.result("AVERAGE_POOL_2D", [tensor], shape, grid, (low, high), fuses=True, **window)
        inputs = [tensor, *_one_channel_each(writer, x.grid, kernel, shape[1], (64, math.prod(kernel)), 0)]
        return writer.result(
            "DEPTHWISE_CONV_2D", inputs, shape, grid, (low, high), fuses=True, depthMultiplier=1, **strides
        )

    return Pending(emit, "an average")


def maximum(
    writer: Writer, shape: Shape, x: object, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), *_: object,
) -> Coded:  # fmt: skip
    """Write MAX_POOL_2D, on the grid of x."""
    x = writer.coded(x, "max pooling")
    kernel, steps, margins = (pair(each) for each in (kernel, stride or kernel, padding))
    if any(each != 1 for each in dilation):
        raise UnwritableError("max pooling with dilation is not written")
    tensor, how = padded(writer, x, shape[2:], kernel, steps, (1, 1), margins, x.grid.qmin)
    return writer.result(
        "MAX_POOL_2D", [tensor], shape, x.grid, fuses=True, padding=how, strideH=steps[0], strideW=steps[1],
        filterHeight=kernel[0], filterWidth=kernel[1],
    )  # fmt: skip


def concatenation(writer: Writer, shape: Shape, tensors: Sequence[object], axis: int = 0) -> Result:
    """Write CONCATENATION."""
    parts = [writer.coded(each, "a concatenation") for each in tensors]
    return _joined(writer, shape, "CONCATENATION", parts, axis=layout(len(shape)).index(axis % len(shape)))


def _joined(writer: Writer, shape: Shape, kind: str, parts: Sequence[Coded], **options: Any) -> Result:
    # The kernels need all operands on the grid of the result.
    def emit(grid: Grid, low: float, high: float) -> Coded:
        inputs = [writer.stored(writer.requantized(each, grid)) for each in parts]
        bounds = (low, high) if grid is FLOAT else None
        return writer.requantized(writer.result(kind, inputs, shape, grid, bounds, **options), grid, (low, high))

    grids = {each.grid for each in parts}
    return emit(grids.pop(), *ANY) if len(grids) == 1 else Pending(emit, kind)


def moved(x: Coded, shape: Sequence[int], writer: Writer) -> Coded:
    """Return x in another shape."""
    axes = x.axes.viewed(shape)
    if axes is not None:
        return Coded(x.tensor, axes, x.grid)
    return Coded(writer.stored(x, range(len(x.axes.dims)), shape), Axes.plain(shape), x.grid)


def moving(move: Callable[..., Coded]) -> Handler:
    """Return a handler of moves, of integers or of results that wait for a grid."""

    def handler(writer: Writer, shape: Shape, x: object, *args: object, **options: object) -> Result:
        if isinstance(x, Pending):
            emit = x.emit
            return replace(x, emit=lambda *bounds: move(writer, shape, emit(*bounds), *args, **options))
        return move(writer, shape, writer.coded(x, "a view"), *args, **options)

    return handler


@moving
def view(writer: Writer, shape: Shape, x: Coded, *_: object, **__: object) -> Coded:
    """Change the shape alone; it needs no operator."""
    return moved(x, shape, writer)


@moving
def permutation(writer: Writer, shape: Shape, x: Coded, order: Sequence[int]) -> Coded:
    """Change the order of the axes; it needs no operator by itself."""
    return Coded(x.tensor, x.axes.permuted([axis % len(order) for axis in order]), x.grid)


def transposition(writer: Writer, shape: Shape, x: object, first: int, second: int) -> Result:
    """Exchange two axes."""
    order = list(range(len(shape)))
    order[first], order[second] = order[second], order[first]
    return permutation(writer, shape, x, order)


@moving
def cropped(writer: Writer, shape: Shape, x: Coded, pairs: Sequence[tuple[int, int]]) -> Coded:
    """Write STRIDED_SLICE for margins below 0."""
    ends = [slice(max(-a, 0), size - max(-b, 0)) for size, (a, b) in zip(x.axes.shape, pairs, strict=True)]
    return writer.sliced(x, tuple(end.stop - end.start for end in ends), dict(enumerate(ends)))


def zero_margins(
    writer: Writer, shape: Shape, x: object, margins: Sequence[int], mode: str = "constant", value: float | None = None
) -> Result:
    """Write PAD with zeros, which later bounds clip as well, or with the lowest integer for -inf."""
    code = LOWEST if value == -math.inf else None
    if mode != "constant" or (value and code is None):
        raise UnwritableError(f"padding with {value or mode} is not written; only 0 and -inf lie on every grid")
    # torch lists the margins of the last axis first.
    pairs = [(0, 0)] * (len(shape) - len(margins) // 2) + list(zip(margins[-2::-2], margins[-1::-2], strict=True))
    if any(min(pair) < 0 for pair in pairs):
        x = cropped(writer, shape, x, pairs)
        pairs = [(max(first, 0), max(last, 0)) for first, last in pairs]
        if not any(map(any, pairs)):
            return x
    stored = [pairs[axis] for axis in layout(len(shape))]
    if not isinstance(x, Pending):
        return pad(writer, writer.coded(x, "a view"), stored, code)
    inner = x

    def emit(grid: Grid, low: float, high: float) -> Coded:
        if low <= 0 <= high:
            return pad(writer, inner.emit(grid, max(low, inner.low), min(high, inner.high)), stored, code)
        if grid is FLOAT:
            raise UnwritableError("its bounds leave out the 0 of a margin")
        made = pad(writer, inner.emit(grid, inner.low, inner.high), stored, code)
        return writer.clipped(made, grid.code(low), grid.code(high), (LOWEST, HIGHEST))

    return Pending(emit, inner.operation)


@moving
def part(
    writer: Writer, shape: Shape, x: Coded, axis: int = 0, first: int | None = 0, end: int | None = None, step: int = 1
) -> Coded:
    """Write STRIDED_SLICE along one axis."""
    return writer.sliced(x, shape, {axis % len(shape): slice(first, end, step)})


@moving
def chosen(writer: Writer, shape: Shape, x: Coded, axis: int, index: int) -> Coded:
    """Select one index along an axis."""
    before = x.axes.shape
    axis, index = axis % len(before), index % before[axis]
    kept = (*before[:axis], 1, *before[axis + 1 :])
    return moved(writer.sliced(x, kept, {axis: slice(index, index + 1)}), shape, writer)


def splitting(writer: Writer, shapes: Sequence[Shape], x: object, _: object, axis: int = 0) -> list[Coded]:
    """Write SPLIT into equal parts, or a STRIDED_SLICE for each."""
    x = writer.coded(x, "a split")
    axis %= len(shapes[0])
    if len(set(shapes)) == 1:
        inputs = [writer.numbers([layout(len(shapes[0])).index(axis)]), writer.stored(x)]
        return writer.parts("SPLIT", inputs, shapes[0], x.grid, len(shapes))
    ends = np.cumsum([shape[axis] for shape in shapes]).tolist()
    kept = [slice(end - shape[axis], end) for shape, end in zip(shapes, ends, strict=True)]
    return [writer.sliced(x, shape, {axis: each}) for shape, each in zip(shapes, kept, strict=True)]


def rearranged(split: Callable[..., Sequence[int]], order: Sequence[int]) -> Handler:
    """Return a handler of axes split by `split(*sizes, number)`, permuted and merged."""

    def handler(writer: Writer, shape: Shape, x: object, number: int) -> Result:
        return view(writer, shape, permutation(writer, (), view(writer, split(*shape, number), x), order))

    return handler


def resized(kind: str, **options: bool) -> Handler:
    """Return the handler of a RESIZE operator, on the grid of x."""

    def handler(writer: Writer, shape: Shape, x: object, _: object, *args: Any) -> Coded:
        x, (*corners, factors) = writer.coded(x, "an interpolation"), args
        for size, wanted, factor in zip(x.axes.shape[2:], shape[2:], factors or (), strict=False):
            if round(size * factor, 6) != wanted:
                said = f"torch resizes {size} pixels to {wanted} by {factor:g} and LiteRT by the ratio of the sizes"
                raise UnwritableError(f"{said}; give size=, or recompute_scale_factor=True")
        corner = {"alignCorners": corners[0], "halfPixelCenters": not corners[0]} if corners else options
        return writer.result(kind, [writer.stored(x), writer.numbers(shape[2:])], shape, x.grid, **corner)

    return handler


def of_rows(handler: Callable[..., object], first: Sequence[int | None]) -> Handler:
    """Return a handler for three axes that calls one for images with a single row.

    `first` are the numbers that stand for that row in the arguments behind x.
    """

    def wide(value: object, first: int | None) -> object:
        if isinstance(value, Weight) and value.codes.dim() == 3:
            return replace(value, codes=value.codes.unsqueeze(2))
        return [first, *value] if first is not None and isinstance(value, (list, tuple)) and value else value

    def on_rows(writer: Writer, shape: Shape, x: object, *args: object) -> Result:
        x = writer.coded(x, "a layer")
        image = moved(x, (*x.axes.shape[:-1], 1, x.axes.shape[-1]), writer)
        given = [wide(*each) for each in zip_longest(args, first[: len(args)])]
        return view(writer, shape, handler(writer, (*shape[:-1], 1, shape[-1]), image, *given))

    return on_rows
