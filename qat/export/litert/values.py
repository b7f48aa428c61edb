"""Values of a traced graph while a file is written, and the `Writer` of operators."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from qat.export.litert.file import FLOAT, HIGHEST, LOWEST, Array, Grid, ModelFile, Option

Shape = tuple[int, ...]
ANY = (-math.inf, math.inf)
FUSED = {None: "NONE", ANY: "NONE", (0.0, math.inf): "RELU", (0.0, 6.0): "RELU6"}
"""Fused activations by the bounds that they give a result in float."""


class UnwritableError(ValueError):
    """Something that LiteRT cannot compute on integers, as the end of a sentence."""


@dataclass(frozen=True)
class Axes:
    """A torch tensor in terms of the tensor that stores it.

    Args:
        sizes: of the stored axes, the last one changes fastest. No axis has length 1.
        dims: for every axis of the torch tensor, the stored axes that make it up, the last one changes fastest. An
            axis of length 1 has none.

    >>> images = Axes.stored((1, 8, 4, 5))  # NHWC in memory
    >>> images.sizes, images.dims
    ((4, 5, 8), ((), (2,), (0,), (1,)))
    """

    sizes: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    @classmethod
    def stored(cls, shape: Sequence[int]) -> "Axes":
        """Return a tensor in the layout that a file has for its number of axes."""
        return cls.plain(shape, layout(len(shape)))

    @classmethod
    def plain(cls, shape: Sequence[int], order: Sequence[int] | None = None) -> "Axes":
        """Return a tensor whose axes lie in this order; None: as in torch."""
        held = [axis for axis in order or range(len(shape)) if shape[axis] != 1]
        dims = tuple((held.index(axis),) if axis in held else () for axis in range(len(shape)))
        return cls(tuple(shape[axis] for axis in held), dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the torch tensor."""
        return tuple(math.prod(self.sizes[axis] for axis in dim) for dim in self.dims)

    def order(self, axes: Sequence[int]) -> list[int]:
        """Return the stored axes of these torch axes; sorted if memory has this order."""
        return [part for axis in axes for part in self.dims[axis]]

    def permuted(self, order: Sequence[int]) -> "Axes":
        """Return the axes after torch.permute."""
        return Axes(self.sizes, tuple(self.dims[axis] for axis in order))

    def viewed(self, shape: Sequence[int]) -> "Axes | None":
        """Return the axes after torch.reshape; None if an axis cannot be split so."""
        parts = [[size] for size in self.sizes]
        waiting = [(axis, 0) for dim in self.dims for axis in dim]
        found: list[list[tuple[int, int]]] = []
        for wanted in shape:
            found.append([])
            while wanted > 1:
                axis, piece = waiting[0]
                size = parts[axis][piece]
                if wanted % size == 0:
                    del waiting[0]
                elif size % wanted == 0:
                    parts[axis][piece:] = [wanted, size // wanted]
                    waiting[0] = (axis, piece + 1)
                else:
                    return None
                found[-1].append((axis, piece))
                wanted //= parts[axis][piece]
        names = [(axis, piece) for axis, sizes in enumerate(parts) for piece in range(len(sizes))]
        return Axes(
            tuple(size for sizes in parts for size in sizes),
            tuple(tuple(names.index(name) for name in dim) for dim in found),
        )

    def transposition(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the shape and the permutation that bring the stored axes in this order."""
        breaks = [place for place in range(1, len(order)) if order[place] != order[place - 1] + 1]
        # Axes that stay neighbours are transposed as one: kernels take few axes.
        runs = [list(order[first:end]) for first, end in pairwise([0, *breaks, len(order)])]
        ranked = sorted(runs)
        return [math.prod(self.sizes[axis] for axis in run) for run in ranked], [ranked.index(run) for run in runs]


def layout(axes: int) -> tuple[int, ...]:
    """Return the torch axes in a file's order: images as NHWC, all else as in torch."""
    return (0, 2, 3, 1) if axes == 4 else tuple(range(axes))


def stored_sizes(shape: Sequence[int]) -> list[int]:
    """Return the sizes with which a file stores a tensor of this torch shape."""
    return [shape[axis] for axis in layout(len(shape))]


@dataclass(frozen=True)
class Coded:
    """A tensor of the file with a torch tensor's integers, and how its axes lie in it."""

    tensor: int
    axes: Axes
    grid: Grid


@dataclass(frozen=True)
class Pending:
    """Result of an operation whose grid is not known yet; without one it is `FLOAT`.

    `emit` writes the operators, for a grid and the lowest and highest value that an activation lets through.
    """

    emit: Callable[[Grid, float, float], Coded]
    operation: str
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Weight:
    """Stored integers: a weight, a bias, or a quantized parameter."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    axis: int | None = None
    layer: str | None = None


class Writer:
    """Writes operators on values into a file, and small weights in 4 bits if wanted."""

    def __init__(self, file: ModelFile, four_bits: bool) -> None:
        self.file, self.four_bits = file, four_bits
        self._moved: dict[tuple[int, Axes, Shape, Shape], int] = {}

    def stored(self, x: Coded, axes: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> int:
        """Return the tensor of x in the order of these axes, by default the file's."""
        axes = layout(len(x.axes.dims)) if axes is None else axes
        shape = [x.axes.shape[axis] for axis in axes] if shape is None else shape
        key, order = (x.tensor, x.axes, tuple(axes), tuple(shape)), x.axes.order(axes)
        if key not in self._moved:
            tensor = x.tensor
            if order != sorted(order):
                seen, permutation = x.axes.transposition(order)
                tensor = self._reshaped(tensor, seen, x.grid)
                moved = self._new("transpose", [seen[axis] for axis in permutation], x.grid)
                self.file.operator("TRANSPOSE", [tensor, self.numbers(permutation)], [moved])
                tensor = moved
            self._moved[key] = self._reshaped(tensor, shape, x.grid)
        return self._moved[key]

    def _reshaped(self, tensor: int, shape: Sequence[int], grid: Grid) -> int:
        if self.file.shapes[tensor] == tuple(shape):
            return tensor
        made = self._new("reshape", shape, grid)
        self.file.operator("RESHAPE", [tensor, self.numbers(shape)], [made], newShape=list(shape))
        return made

    def numbers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> int:
        """Add a constant of whole numbers and return its tensor."""
        return self.file.constant("numbers", np.array(values, np.int32))

    def _new(self, name: str, shape: Sequence[int], grid: Grid) -> int:
        return self.file.tensor(f"{name}_{len(self.file.shapes)}", shape, "INT8", grid)

    def result(
        self, kind: str, inputs: Sequence[int], shape: Sequence[int], grid: Grid,
        values: tuple[float, float] | None = None, *, fuses: bool = False, **options: Option,
    ) -> Coded:  # fmt: skip
        """Write one operator with a bounded result of this torch shape on the grid.

        `values` are the lowest and the highest that an activation lets through; None: the integers are those of inputs
        on the same grid. The operator takes a fused activation if `fuses`; `options` are its others.
        """
        low, high = LOWEST, HIGHEST  # the bounds wanted of the integers
        activation, first, last = "NONE", LOWEST, HIGHEST  # and those that a fused activation gives them
        if grid is FLOAT:
            inputs = [self.file.in_float(each) for each in inputs]
            activation = FUSED.get(values, "")
            if not activation or (activation != "NONE" and not fuses):
                raise UnwritableError(f"no quantizer follows the bounds of a result of {kind}")
        else:
            if values is not None:
                low, high = map(grid.code, values)
            if fuses:
                activation, first, last = grid.fused(low, high)
        if fuses:
            options["fusedActivationFunction"] = getattr(self.file.schema.ActivationFunctionType, activation)
        made = self._new(kind.lower(), stored_sizes(shape), grid)
        self.file.operator(kind, inputs, [made], **options)
        return self.clipped(Coded(made, Axes.stored(shape), grid), low, high, (first, last))

    def parts(self, kind: str, inputs: Sequence[int], shape: Sequence[int], grid: Grid, count: int) -> list[Coded]:
        """Write one operator with several results, each of this torch shape."""
        made = [self._new(kind.lower(), stored_sizes(shape), grid) for _ in range(count)]
        self.file.operator(kind, inputs, made, numSplits=count)
        return [Coded(tensor, Axes.stored(shape), grid) for tensor in made]

    def sliced(self, x: Coded, shape: Shape, kept: Mapping[int, slice]) -> Coded:
        """Write STRIDED_SLICE along torch axes, with a result of this shape."""
        if shape == x.axes.shape:
            return x
        bounds = [kept.get(axis, slice(None)).indices(x.axes.shape[axis]) for axis in layout(len(shape))]
        inputs = [self.stored(x), *map(self.numbers, zip(*bounds, strict=True))]
        return self.result("STRIDED_SLICE", inputs, shape, x.grid)

    def clipped(self, x: Coded, low: int, high: int, held: tuple[int, int]) -> Coded:
        """Clip the integers of x, which lie within `held`, to low .. high."""
        for kind, bound, needed in (("MAXIMUM", low, low > held[0]), ("MINIMUM", high, high < held[1])):
            if needed:
                constant = self.file.constant("bound", np.array([bound], np.int8), x.grid)
                made = self._new(kind.lower(), self.file.shapes[x.tensor], x.grid)
                self.file.operator(kind, [x.tensor, constant], [made])
                x = Coded(made, x.axes, x.grid)
        return x

    def requantized(self, x: Coded, grid: Grid, values: tuple[float, float] = ANY, factor: float = 1.0) -> Coded:
        """Return x * factor on another grid, within these values; unchanged for float32."""
        if grid is FLOAT:
            return x
        low, high = map(grid.code, values)
        if (x.grid.scale, x.grid.zero_point, factor) == (grid.scale, grid.zero_point, 1.0):
            return self.clipped(x, low, high, (x.grid.qmin, x.grid.qmax))
        # x * 1, since XNNPACK's QUANTIZE keeps 8 bits of the ratio of the scales.
        made = self._new("quantize", self.file.shapes[x.tensor], grid)
        size = 1 if factor == 1.0 else 64  # fixed point rounds a larger product with less loss
        code, step = np.array([size * np.sign(factor)], np.int8), (abs(factor) or 1.0) / size
        one = self._constant("one", code, Grid(step, 0, LOWEST, HIGHEST))
        self.file.operator("MUL", [x.tensor, one.tensor], [made])
        return self.clipped(Coded(made, x.axes, grid), low, high, (LOWEST, HIGHEST))

    def coded(self, x: object, operation: str) -> Coded:
        """Return an operand as integers; a number or a parameter becomes a constant."""
        if isinstance(x, (int, float)) and x:
            grid = Grid(abs(float(np.float32(x))) / HIGHEST, 0, LOWEST, HIGHEST)
            return self._constant("number", np.array([HIGHEST if x > 0 else -HIGHEST], np.int8), grid)
        if isinstance(x, Weight) and x.axis is None:
            first = 0 if x.codes.is_signed() else -LOWEST
            grid = Grid(float(x.scale), int(x.zero_point or 0) - first, LOWEST, HIGHEST)
            return self._constant(x.layer or "parameter", (x.codes.int() - first).numpy().astype(np.int8), grid)
        if not isinstance(x, Coded):
            raise UnwritableError(f"{operation} reads a tensor that lies on no grid")
        return x

    def _constant(self, name: str, codes: Array, grid: Grid) -> Coded:
        axes = Axes.stored(codes.shape)
        codes = codes.transpose(layout(codes.ndim))
        return Coded(self.file.constant(name, np.ascontiguousarray(codes), grid), axes, grid)
