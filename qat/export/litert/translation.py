"""`Translation`: writes a traced graph with marked quantization, node by node."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qat.export.checks import result_names
from qat.export.litert import operations as of
from qat.export.litert.file import FLOAT, HIGHEST, LOWEST, Grid
from qat.export.litert.products import convolution, linear, matmul, transposed_convolution
from qat.export.litert.values import Axes, Coded, Pending, UnwritableError, Weight, Writer, layout, stored_sizes
from qat.integers.frozen import Operations
from qat.torch_internals import NEAREST_EXACT_OPERATORS, UNSAFE_VIEW_OPERATOR, pytree


@torch.library.custom_op("qat::litert_quantize", mutates_args=())
def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, low: Tensor | None, high: Tensor | None, name: str
) -> Tensor:
    """Compute `Operations.quantize`, recorded with the quantizer's name."""
    return Operations().quantize(x, scale, zero_point, None if low is None or high is None else (low, high), name)


@torch.library.custom_op("qat::litert_dequantize", mutates_args=())
def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None, layer: str | None = None
) -> Tensor:
    """Compute `Operations.dequantize`, recorded with the layer's name."""
    return Operations().dequantize(codes, scale, zero_point, axis, layer)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, low: Tensor | None, high: Tensor | None, name: str) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@dequantize.register_fake
def _(codes: Tensor, *_: object) -> Tensor:
    return torch.empty_like(codes, dtype=torch.float32)


class LiteRTOperations(Operations):
    """Quantization as operators that torch.export records."""

    def quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[Tensor, Tensor] | None, quantizer: str
    ) -> Tensor:
        """Return the integers of x, from the operator `quantize` of this file."""
        low, high = bounds or (None, None)
        return quantize(x, scale, zero_point, low, high, quantizer)  # type: ignore[no-any-return]

    dequantize = staticmethod(dequantize)


aten = torch.ops.aten

VIEWS = (
    aten.view.default, aten.reshape.default, UNSAFE_VIEW_OPERATOR.default, aten.flatten.using_ints,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default,
    aten.contiguous.default, aten.dropout.default, aten.alias.default,
)  # fmt: skip

HANDLERS: dict[object, Callable[..., of.Result | list[Coded]]] = {
    **dict.fromkeys(VIEWS, of.view),
    aten.conv2d.default: convolution,
    aten.conv2d.padding: convolution,
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.bmm.default: matmul,
    aten.add.Tensor: of.binary("ADD"),
    aten.sub.Tensor: of.binary("SUB"),
    aten.mul.Tensor: of.binary("MUL"),
    aten.relu.default: lambda writer, shape, x: of.clamp(writer, shape, x, 0.0),
    aten.hardtanh.default: lambda writer, shape, x, low=-1.0, high=1.0: of.clamp(writer, shape, x, low, high),
    aten.relu6.default: lambda writer, shape, x: of.clamp(writer, shape, x, 0.0, 6.0),
    **dict.fromkeys([aten.clamp.default, aten.clip.default, aten.clamp_min.default], of.clamp),
    aten.clamp_max.default: lambda writer, shape, x, high: of.clamp(writer, shape, x, None, high),
    aten.sigmoid.default: of.unary("LOGISTIC", of.PROBABILITIES),
    aten.tanh.default: of.unary("TANH", of.ANGLES),
    aten.hardswish.default: of.unary("HARD_SWISH"),
    aten.gelu.default: lambda *args, approximate="none": of.unary("GELU", approximate=approximate == "tanh")(*args),
    aten.softmax.int: of.softmax,
    aten.hardsigmoid.default: of.hardsigmoid,
    aten.mean.dim: of.mean,
    aten.adaptive_avg_pool2d.default: of.adaptive_average,
    aten.avg_pool2d.default: of.average,
    aten.max_pool2d.default: of.maximum,
    aten.cat.default: of.concatenation,
    aten.permute.default: of.permutation,
    aten.transpose.int: of.transposition,
    aten.constant_pad_nd.default: lambda writer, shape, x, margins, value=0: of.zero_margins(
        writer, shape, x, margins, "constant", value
    ),
    aten.pad.default: of.zero_margins,
    aten.slice.Tensor: of.part,
    aten.select.int: of.chosen,
    aten.split.Tensor: of.splitting,
    aten.split_with_sizes.default: of.splitting,
    aten.maximum.default: of.extreme("MAXIMUM"),
    aten.minimum.default: of.extreme("MINIMUM"),
    aten.leaky_relu.default: of.leaky_relu,
    aten.conv_transpose2d.input: transposed_convolution,
    aten.pixel_shuffle.default: of.rearranged(lambda n, c, h, w, r: (n, c, r, r, h // r, w // r), (0, 1, 4, 2, 5, 3)),
    aten.pixel_unshuffle.default: of.rearranged(lambda n, c, h, w, r: (n, c // r**2, h, r, w, r), (0, 1, 3, 5, 2, 4)),
    aten.channel_shuffle.default: of.rearranged(lambda n, c, h, w, g: (n, g, c // g, h, w), (0, 2, 1, 3, 4)),
    aten.upsample_nearest2d.vec: of.resized("RESIZE_NEAREST_NEIGHBOR"),
    NEAREST_EXACT_OPERATORS[1].vec: of.resized("RESIZE_NEAREST_NEIGHBOR", halfPixelCenters=True),
    aten.upsample_bilinear2d.vec: of.resized("RESIZE_BILINEAR"),
    operator.getitem: lambda writer, shape, values, index: values[index],
}
"""Functions that write a call of torch: from the writer, the shape of the result, and the arguments of the call."""

ROWS: dict[object, tuple[object, tuple[int | None, ...]]] = {
    aten.conv1d.default: (aten.conv2d.default, (None, None, 1, 0, 1)),
    aten.conv1d.padding: (aten.conv2d.padding, (None, None, 1, None, 1)),
    aten.conv_transpose1d.default: (aten.conv_transpose2d.input, (None, None, 1, 0, 0, None, 1)),
    aten.max_pool1d.default: (aten.max_pool2d.default, (1, 1, 0, 1)),
    aten.avg_pool1d.default: (aten.avg_pool2d.default, (1, 1, 0)),
    aten.adaptive_avg_pool1d.default: (aten.adaptive_avg_pool2d.default, (1,)),
    aten.upsample_nearest1d.vec: (aten.upsample_nearest2d.vec, (1, 1)),
    NEAREST_EXACT_OPERATORS[0].vec: (NEAREST_EXACT_OPERATORS[1].vec, (1, 1)),
    aten.upsample_linear1d.vec: (aten.upsample_bilinear2d.vec, (1, None, 1)),
}
"""Calls with three axes, those with four that compute them, and what `of_rows` puts in front of their arguments."""

HANDLERS |= {row: of.of_rows(HANDLERS[image], first) for row, (image, first) in ROWS.items()}


class Translation(fx.Interpreter):
    """Writes a program of torch.export, traced with `LiteRTOperations`, into a file."""

    def __init__(self, writer: Writer, program: torch.export.ExportedProgram, integer_ends: bool) -> None:
        super().__init__(program.module(check_guards=False))
        self.extra_traceback = False  # an error is one sentence
        self.writer, self.file, self.integer_ends = writer, writer.file, integer_ends
        self.inputs: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.refused: dict[str, str] = {}  # module or call to the reason why it cannot be written
        self._named: set[int] = set()  # tensors that have a quantizer's name: two equal quantizers share one
        self._result_names = result_names(program)
        self.run(enable_io_processing=False)
        ends = [node for node in self.graph.nodes if node.op == "placeholder" and isinstance(node.meta["val"], Tensor)]
        self.inputs = {node.name: self._float_input(node) for node in ends}  # in forward's order

    def run_node(self, node: fx.Node) -> Any:
        """Return the value of a node; those of constants are tensors."""
        if node.op == "placeholder":
            return Pending(lambda *bounds: self._input(node, *bounds), "an input")
        if node.op not in ("call_function", "output"):
            return super().run_node(node).detach()
        try:
            return self._value(node, *self.fetch_args_kwargs_from_env(node))
        except UnwritableError as error:
            place = _place(node)
            self.refused[place.partition(" (")[0]] = f"{place}: {error}"
            # Stand-ins take the place of the results, so that the nodes that read them are checked too.
            grid = Grid(1.0, 0, LOWEST, HIGHEST)
            made = self.writer.result
            return pytree.tree_map_only(Tensor, lambda x: made("", [], tuple(x.shape), grid), node.meta.get("val"))

    def _value(self, node: fx.Node, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if node.op == "output":
            return self._write_outputs(args[0])
        if node.target is torch.ops.qat.litert_quantize.default:
            return self._quantized(*args)
        if node.target is torch.ops.qat.litert_dequantize.default:
            return args[0] if isinstance(args[0], Coded) else Weight(*args)  # else the integers are constants
        read = pytree.tree_leaves((args, options))
        if not any(isinstance(each, (Coded, Pending, Weight)) for each in read):
            assert callable(node.target)
            return node.target(*args, **options)  # of constants alone
        if node.target not in HANDLERS:
            raise UnwritableError("LiteRT has no integer operator for it, or none that is written here")
        shape = pytree.tree_map(lambda each: tuple(each.shape), node.meta["val"])
        return HANDLERS[node.target](self.writer, shape, *args, **options)

    def _quantized(
        self, x: object, scale: Tensor, zero_point: Tensor, low: Tensor | None, high: Tensor | None, name: str
    ) -> Coded:
        grid = Grid.of(scale, zero_point, low, high)
        if isinstance(x, Pending):
            made = x.emit(grid, x.low, x.high)
        else:
            made = self.writer.requantized(self.writer.coded(x, "a quantizer"), grid)
        if made.tensor not in self._named:
            # Its integers are looked up under the quantizer's name, and read as a tensor of torch's shape.
            order, sizes = made.axes.order(layout(len(made.axes.dims))), self.file.shapes[made.tensor]
            read = Axes.stored([sizes[axis] for axis in np.argsort(layout(len(sizes)))])
            if order == sorted(order) or read.viewed(made.axes.shape) != made.axes:
                made = Coded(self.writer.stored(made), Axes.stored(made.axes.shape), made.grid)
            self.file.tensors[made.tensor].name = name
            self._named.add(made.tensor)
        return made

    def _input(self, x: fx.Node, grid: Grid, low: float, high: float) -> Coded:
        axes = Axes.stored(x.meta["val"].shape)
        if grid is FLOAT:
            raise UnwritableError(f"no quantizer reads the input {x.name!r}")
        if self.integer_ends:
            if x.name in self.inputs:
                raise UnwritableError(f"the input {x.name!r} has several grids; export it with float ends")
            self.inputs[x.name] = tensor = self.file.tensor(x.name, stored_sizes(axes.shape), "INT8", grid)
            return self.writer.clipped(Coded(tensor, axes, grid), grid.code(low), grid.code(high), (LOWEST, HIGHEST))
        return self.writer.result("QUANTIZE", [self._float_input(x)], axes.shape, grid, (low, high))

    def _float_input(self, x: fx.Node) -> int:
        if x.name not in self.inputs:
            self.inputs[x.name] = self.file.tensor(x.name, stored_sizes(x.meta["val"].shape), "FLOAT32")
        return self.inputs[x.name]

    def _write_outputs(self, results: Sequence[object]) -> None:
        for name, value in zip(self._result_names, results, strict=True):
            if isinstance(value, Pending) and not self.integer_ends:
                value = value.emit(FLOAT, value.low, value.high)
            if not isinstance(value, Coded):
                what = value.operation if isinstance(value, Pending) else "a constant"
                raise UnwritableError(f"{name!r} is {what} that no quantizer follows")
            tensor = self.writer.stored(value)
            if not self.integer_ends:
                tensor = self.file.in_float(tensor)
                self.file.tensors[tensor].name = name
            self.outputs[name] = tensor


def _place(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values() if path]
    call = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", str(node.target))
    return f"{paths[-1]!r} ({call})" if paths else call
