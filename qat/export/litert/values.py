"""What the nodes of a traced graph stand for while a file is written, and the operators that bring it there."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from qat.export.litert.axes import Axes, layout
from qat.export.litert.file import FLOAT, HIGHEST, LOWEST, Grid, ModelFile

Shape = tuple[int, ...]
ANY = (-math.inf, math.inf)
FUSED = {None: "NONE", ANY: "NONE", (0.0, math.inf): "RELU", (0.0, 6.0): "RELU6"}
"""What bounds a result in float."""


class UnwritableError(ValueError):
    """Something that no operator of LiteRT computes on integers, as the end of a sentence."""


@dataclass(frozen=True)
class Coded:
    """A tensor of the file with the integers of a torch tensor, whose axes lie in it so."""

    tensor: int
    axes: Axes
    grid: Grid


@dataclass(frozen=True)
class Pending:
    """The result of an operation whose grid is not known yet: a quantizer follows, or nothing, which makes it `FLOAT`.

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
    """Writes operators on values into a file; weights that fit 4 bits are stored in 4 if that is wanted."""

    def __init__(self, file: ModelFile, four_bits: bool) -> None:
        self.file, self.four_bits = file, four_bits
        self._moved: dict[tuple[Any, ...], int] = {}

    def stored(self, x: Coded, axes: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> int:
        """The tensor with x's integers in the order of these torch axes, by default in the file's layout."""
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

    def numbers(self, values: Sequence[Any]) -> int:
        """A constant of whole numbers."""
        return self.file.constant("numbers", np.array(values, np.int32))

    def _new(self, name: str, shape: Sequence[int], grid: Grid) -> int:
        return self.file.tensor(f"{name}_{len(self.file.shapes)}", shape, "INT8", grid)

    def result(
        self, kind: str, inputs: Sequence[int], shape: Sequence[int], grid: Grid,
        values: tuple[float, float] | None = None, *, fuses: bool = False, **options: Any,
    ) -> Coded:  # fmt: skip
        """One operator, whose result has this torch shape and lies on the grid, and what else bounds it.

        `values` are the lowest and the highest that an activation lets through; None: the integers are those of inputs
        on the same grid. `fuses` says whether the operator takes a fused activation; `options` are its others.
        """
        low, high, name, first, last = LOWEST, HIGHEST, "NONE", LOWEST, HIGHEST
        if grid is FLOAT:
            inputs, name = [self.file.in_float(each) for each in inputs], FUSED.get(values, "")
            if not name or (name != "NONE" and not fuses):
                raise UnwritableError(f"no quantizer follows the bounds of a result of {kind}")
        elif values is not None:
            low, high = map(grid.code, values)
        if fuses and grid is not FLOAT:
            name, first, last = grid.fused(low, high)
        if fuses:
            options["fusedActivationFunction"] = getattr(self.file.schema.ActivationFunctionType, name)
        made = self._new(kind.lower(), [shape[axis] for axis in layout(len(shape))], grid)
        self.file.operator(kind, inputs, [made], **options)
        return self.clipped(Coded(made, Axes.stored(shape), grid), low, high, (first, last))

    def parts(self, kind: str, inputs: Sequence[int], shape: Sequence[int], grid: Grid, count: int) -> list[Coded]:
        """One operator with several results, each of this torch shape."""
        stored = [shape[axis] for axis in layout(len(shape))]
        made = [self._new(kind.lower(), stored, grid) for _ in range(count)]
        self.file.operator(kind, inputs, made, numSplits=count)
        return [Coded(tensor, Axes.stored(shape), grid) for tensor in made]

    def sliced(self, x: Coded, shape: Shape, kept: Mapping[int, slice]) -> Coded:
        """What slices along torch axes keep of x, in this shape: STRIDED_SLICE."""
        if shape == x.axes.shape:
            return x
        bounds = [kept.get(axis, slice(None)).indices(x.axes.shape[axis]) for axis in layout(len(shape))]
        inputs = [self.stored(x), *map(self.numbers, zip(*bounds, strict=True))]
        return self.result("STRIDED_SLICE", inputs, shape, x.grid)

    def clipped(self, x: Coded, low: int, high: int, held: tuple[int, int]) -> Coded:
        """x with its integers within low .. high, where they are within `held` already."""
        for kind, bound, needed in (("MAXIMUM", low, low > held[0]), ("MINIMUM", high, high < held[1])):
            if needed:
                constant = self.file.constant("bound", np.array([bound], np.int8), x.grid)
                made = self._new(kind.lower(), self.file.shapes[x.tensor], x.grid)
                self.file.operator(kind, [x.tensor, constant], [made])
                x = Coded(made, x.axes, x.grid)
        return x

    def requantized(self, x: Coded, grid: Grid, values: tuple[float, float] = ANY, factor: float = 1.0) -> Coded:
        """x times a number on another grid, within these values; what is to be float32 stays as it is."""
        if grid is FLOAT:
            return x
        low, high = map(grid.code, values)
        if (x.grid.scale, x.grid.zero_point, factor) == (grid.scale, grid.zero_point, 1.0):
            return self.clipped(x, low, high, (x.grid.low, x.grid.high))
        # x * 1, since XNNPACK's QUANTIZE keeps 8 bits of the ratio of the scales.
        made = self._new("quantize", self.file.shapes[x.tensor], grid)
        size = 1 if factor == 1.0 else 64  # fixed point rounds a larger product with less loss
        code, step = np.array([size * np.sign(factor)], np.int8), (abs(factor) or 1.0) / size
        one = self._constant("one", code, Grid(step, 0, LOWEST, HIGHEST))
        self.file.operator("MUL", [x.tensor, one.tensor], [made])
        return self.clipped(Coded(made, x.axes, grid), low, high, (LOWEST, HIGHEST))

    def coded(self, x: Any, operation: str) -> Coded:
        """An operand as integers of the file; a number or a quantized parameter becomes a constant."""
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

    def _constant(self, name: str, codes: Any, grid: Grid) -> Coded:
        axes = Axes.stored(codes.shape)
        codes = codes.transpose(layout(codes.ndim))
        return Coded(self.file.constant(name, np.ascontiguousarray(codes), grid), axes, grid)
