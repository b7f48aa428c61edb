"""Facts about a quantized graph that matter to one runtime or another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import numpy as np

from qat.export.onnx.graph import Array, Edges, attributes

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"

LAYERS = {"Conv": 0, "ConvTranspose": 1, "Gemm": -1, "MatMul": -1}
"""Operators with a weight, and the axis of its output channels."""

Fact: TypeAlias = "tuple[str, NodeProto, str]"
"""Name of a rule, operator, and what is seen there; "" if the rule says it all."""

ELEMENTWISE = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax")
"""Operators whose integer kernels, where a runtime has them, take quantized operands and a quantized result."""

ONE_GRID = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Flatten", "Gather", "Expand", "Resize")
"""Operators whose results are some of their first operand's values."""

OPERATIONS = {
    "Div": "div", "Elu": "elu", "Erf": "gelu", "Gelu": "gelu", "GroupNormalization": "group_norm", "Sub": "sub",
    "HardSigmoid": "hardsigmoid", "HardSwish": "hardswish", "InstanceNormalization": "instance_norm", "Tanh": "tanh",
    "LayerNormalization": "layer_norm", "LeakyRelu": "leaky_relu", "LogSoftmax": "log_softmax", "Max": "maximum",
    "ReduceMean": "mean", "Min": "minimum", "Mish": "mish", "PRelu": "prelu", "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}  # fmt: skip
"""Operators and their names in a `TargetProfile`."""

KINDS = {"int32": "int32-bias", "uint8": "unsigned", **dict.fromkeys(("int16", "uint16"), "16-bits"),
         **dict.fromkeys(("int4", "uint4", "int2", "uint2"), "4-bits")}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """The grid of one QuantizeLinear or DequantizeLinear.

    `scale` and `zero_point` are None where the model computes them, `kind` names the integers' type.
    """

    node: NodeProto
    scale: Array | None
    zero_point: Array | None
    kind: str
    axis: int

    def equals(self, other: Grid) -> bool:
        """Return True if both are known to have the same scale, zero point and type."""
        pairs = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        same = all(a is not None and b is not None and np.array_equal(np.ravel(a), np.ravel(b)) for a, b in pairs)
        return same and self.kind == other.kind


class QuantizedGraph(Edges):
    """A graph, and the operators that its runtime moves quantizers across."""

    def __init__(self, graph: GraphProto, moving: Sequence[str]) -> None:
        super().__init__(graph)
        self.nodes, self.moving = list(graph.node), moving
        self.constant = set(self.stored)
        axes = [axis for each in graph.input for axis in each.type.tensor_type.shape.dim]
        self.has_free_axes = not all(axis.HasField("dim_value") for axis in axes)
        for node in self.nodes:
            if node.input and all(name in self.constant for name in node.input if name):
                self.constant.update(node.output)

    def grid(self, node: NodeProto) -> Grid:
        """Return the grid of a QuantizeLinear or a DequantizeLinear."""
        from onnx import TensorProto, helper

        scale, zero_point = (self.stored.get(name) for name in [*node.input[1:3], ""][:2])
        given = attributes(node)
        quantize = node if _is_quantize(node) else self.maker(node.input[0], QUANTIZE)
        typed = zero_point if zero_point is not None else self.stored.get(node.input[0])
        if typed is not None and typed.dtype != np.float32:
            kind = typed.dtype.name
        elif quantize is not None and quantize is not node:
            kind = self.grid(quantize).kind
        else:
            kind = helper.tensor_dtype_to_np_dtype(given.get("output_dtype", 0) or TensorProto.UINT8).name
        if len(node.input) < 3 or not node.input[2]:
            zero_point = np.zeros(1)  # ONNX's default
        return Grid(node, scale, zero_point, kind, given.get("axis", 1))

    def moves(self, node: NodeProto) -> bool:
        """Return True if an operator only hands on values of its first operand."""
        # A linear Resize computes new values.
        return node.op_type in self.moving and attributes(node).get("mode", b"nearest") == b"nearest"

    def origin(self, name: str) -> str:
        """Return the tensor whose values were moved to this one."""
        while name in self.made and self.moves(self.made[name]):
            name = self.made[name].input[0]
        return name

    def grid_of(self, name: str) -> Grid | None:
        """Return the grid of a tensor's values, across moves; None for floats."""
        node = self.maker(self.origin(name), DEQUANTIZE)
        return None if node is None else self.grid(node)

    def behind(self, name: str) -> list[NodeProto | None]:
        """Return a tensor's readers across moves, equal quantizers once; None is the user."""
        found: list[NodeProto | None] = []
        for node in self.read_by.get(name, []):
            for each in self.behind(node.output[0]) if node is not None and self.moves(node) else [node]:
                known = [self.grid(other) for other in found if _is_quantize(other)]
                if not _is_quantize(each) or not any(self.grid(each).equals(other) for other in known):
                    found.append(each)
        return found

    def channel_axis(self, layer: NodeProto, weight: Grid) -> int | None:
        """Return the axis of a weight's output channels; None behind a reshape."""
        rank = len(getattr(self.stored.get(weight.node.input[0]), "shape", "12"))
        turned = attributes(layer).get("transB")
        name, axis = layer.input[1], (0 if turned else LAYERS[layer.op_type]) % rank
        while name != weight.node.output[0]:
            node = self.maker(name, "Transpose", "Identity")
            if node is None:
                return None
            if node.op_type == "Transpose":
                axis = attributes(node).get("perm", range(rank)[::-1])[axis]
            name = node.input[0]
        return axis


def _is_quantize(node: NodeProto | None) -> TypeGuard[NodeProto]:
    return node is not None and node.op_type == QUANTIZE


def facts(found: QuantizedGraph, in_float: frozenset[str]) -> Iterator[Fact]:
    """Yield all facts; operations in `in_float` have no integer kernels."""
    for node in found.nodes:
        if node.op_type == QUANTIZE or (node.op_type == DEQUANTIZE and not found.maker(node.input[0], QUANTIZE)):
            yield from _grid(found, found.grid(node), node.input[0] in found.constant)
        elif node.op_type in LAYERS:
            yield from _layer(found, node)
        elif node.op_type != DEQUANTIZE:
            yield from _operator(found, node, in_float)


def _grid(found: QuantizedGraph, grid: Grid, constant: bool) -> Iterator[Fact]:
    node = grid.node
    if grid.kind in KINDS or grid.kind.startswith("float8"):
        yield KINDS.get(grid.kind, "float8"), node, "" if grid.kind in ("int32", "uint8") else grid.kind
    if grid.scale is None or grid.zero_point is None:
        yield "computed-grid", node, ""
    else:
        if not (grid.scale > 0).all():
            yield "scale", node, f"{float(grid.scale.min()):g}"
        if grid.zero_point.any():
            farthest = max(np.ravel(grid.zero_point).tolist(), key=abs)
            yield "weight-zero-point" if constant else "zero-point", node, f"{farthest:g}"
        elif constant and grid.kind == "uint8":
            yield "unsigned-weight", node, ""
        if grid.scale.size > 1 and not constant:
            yield "channel-activation", node, f"{grid.scale.size} scales"
    if node.op_type == QUANTIZE:
        for reader in found.read_by.get(node.output[0], []):
            if reader is None or reader.op_type != DEQUANTIZE:
                yield "integer-operator", node, "the output" if reader is None else reader.op_type
        before, across = found.grid_of(node.input[0]), found.origin(node.input[0]) != node.input[0]
        if before is not None and not before.equals(grid) and before.node.input[0] not in found.constant:
            yield "other-grid" if across else "double", node, ""


def _layer(found: QuantizedGraph, node: NodeProto) -> Iterator[Fact]:
    x, weight = (found.grid_of(name) for name in node.input[:2])
    constant, last = node.input[1] in found.constant, _end(found, node)
    in_integers = [each for each in found.behind(last.output[0]) if _is_quantize(each)]
    if x is None or weight is None:
        rounded = weight is None and constant and node.op_type != "MatMul" and in_integers
        what = "its input" if x is None else "its weight" if constant else "its second operand"
        if x is not None or weight is not None:
            yield "rounded-weight" if rounded else "float-operand", node, f"{what} is float"
        return
    if constant and weight.scale is not None and len(np.unique(weight.scale)) > 1:
        axis = found.channel_axis(node, weight)
        if axis is not None and weight.axis % max(axis + 1, 2) != axis:
            yield "weight-axis", node, f"axis {weight.axis}, not {axis}"
    bias = found.grid_of(node.input[2]) if len(node.input) > 2 else None
    scales = [each.scale for each in (x, weight, bias) if each is not None and each.scale is not None]
    if bias is not None and bias.kind != "int32":
        yield "bias-grid", node, bias.kind
    elif len(scales) == 3 and not np.allclose(scales[2], scales[0] * scales[1], rtol=0.02, atol=0):
        yield "bias-scale", node, ""
    # ONNX Runtime makes a Gemm of a MatMul whose batch is fixed.
    is_gemm = node.op_type == "Gemm" or (node.op_type == "MatMul" and not found.has_free_axes)
    if is_gemm and bias is None and not in_integers:
        added = [name for name in (node.input[2:] if last is node else last.input) if name in found.constant]
        if added and found.grid_of(added[0]) is None:
            yield "float-bias", node, ""
    mixed = "" if x.kind == weight.kind else f"{x.kind} by {weight.kind}"
    if weight.kind == "uint8" and weight.scale is not None and weight.scale.size > 1:
        mixed = "uint8 per channel"
    if mixed or node.op_type in ("Gemm", "MatMul"):
        yield "xnnpack-types", node, mixed or node.op_type
    yield from _kernel(found, node, [x] if constant else [x, weight])


def _end(found: QuantizedGraph, node: NodeProto) -> NodeProto:
    # The operator that ends a layer: the Add of a MatMul's bias, or the layer itself.
    behind = found.reader(node.output[0])
    if behind is None or behind.op_type != "Add" or node.op_type != "MatMul" or node.input[1] not in found.constant:
        return node
    return behind if any(name in found.constant for name in behind.input) else node


def _kernel(found: QuantizedGraph, node: NodeProto, operands: list[Grid]) -> Iterator[Fact]:
    # An integer kernel needs a result that one quantizer alone reads, and integers of one type.
    behind = found.behind(_end(found, node).output[0])
    clip = behind[0] if len(behind) == 1 and behind[0] is not None and behind[0].op_type in ("Relu", "Clip") else None
    behind = behind if clip is None else found.behind(clip.output[0])
    grids = [found.grid(each) for each in behind if _is_quantize(each)]
    if len(behind) == 1 and grids:
        if clip is not None and not _ends_within(found, clip, grids[0]):
            yield "clip-kept", node, f"{clip.op_type} in front of {grids[0].node.name or grids[0].node.output[0]}"
    elif grids or node.op_type not in ("Gemm", "MatMul"):
        read_by = ", ".join(sorted({"the output" if each is None else each.op_type for each in behind}))
        yield "result" if grids or node.op_type == "Conv" else "float-result", node, f"read by {read_by}"
    kinds = {grid.kind if _is_shared(found, grid) else "uint8" for grid in (*operands, *grids)}
    if "int8" in kinds and (node.op_type in ("Conv", "MatMul") or len(kinds) > 1):
        yield "shared-int8", node, ""
    if node.op_type == "ConvTranspose":
        yield "transposed", node, ""


def _ends_within(found: QuantizedGraph, clip: NodeProto, grid: Grid) -> bool:
    # True if the quantizer alone clips as much as a Relu or Clip in front of it.
    if grid.scale is None or grid.zero_point is None or "int" not in grid.kind:
        return False
    limits, given = np.iinfo(grid.kind), [*clip.input[1:], "", ""]
    low, high = found.stored.get(given[0], -np.inf), found.stored.get(given[1], np.inf)
    ends = (0, np.inf) if clip.op_type == "Relu" else (float(low), float(high))
    low, high = (np.rint(end / grid.scale.max()) + float(grid.zero_point.max()) for end in ends)
    return bool(low <= limits.min and high >= limits.max)


def _is_shared(found: QuantizedGraph, grid: Grid) -> bool:
    # True unless a single operator reads the integers of a quantizer, behind one DequantizeLinear.
    quantize = grid.node if _is_quantize(grid.node) else found.maker(grid.node.input[0], QUANTIZE)
    pairs = found.read_by.get(quantize.output[0], []) if quantize is not None else []
    return len(pairs) > 1 or any(
        pair is None or pair.op_type != DEQUANTIZE or len(found.read_by.get(pair.output[0], [])) > 1 for pair in pairs
    )


def _operator(found: QuantizedGraph, node: NodeProto, in_float: frozenset[str]) -> Iterator[Fact]:
    if node.op_type.startswith(("QLinear", "DynamicQuantize", "TRT_")) or node.op_type.endswith("Integer"):
        yield "operator-format", node, node.op_type
    elif node.op_type == "Cast" and "int4" in getattr(found.stored.get(node.input[0]), "dtype", np.dtype(float)).name:
        yield "cast-4-bits", node, ""
    joins = node.op_type in ELEMENTWISE
    given = [name for name in node.input if name] if joins else list(node.input[:1])
    grids = [grid for grid in map(found.grid_of, given) if grid is not None]
    behind = [found.grid(each) for each in found.behind(node.output[0]) if _is_quantize(each)] if node.output else []
    if not grids:
        layers = [found.maker(name, "Conv") for name in given if name not in found.constant]
        if node.op_type == "Add" and len(layers) == 2 and any(each and found.grid_of(each.input[0]) for each in layers):
            yield "residual", node, ""
        return
    made = [found.maker(grid.node.input[0], QUANTIZE) for grid in grids]
    from_layer = any(each is not None and found.maker(each.input[0], *LAYERS) for each in made)
    if node.op_type in ("BatchNormalization", "Relu", "Clip") and from_layer:
        yield "split-block", node, ""
    if node.op_type in ONE_GRID and node.op_type not in found.moving:
        yield from [("other-grid", node, "") for each in behind if not each.equals(grids[0])][:1]
    gates = [found.maker(name, "Sigmoid") for name in given] if node.op_type == "Mul" else []
    operation = "silu" if any(gate and gate.input[0] in given for gate in gates) else OPERATIONS.get(node.op_type)
    if behind and operation in in_float:
        yield "float-operation", node, str(operation)
    elif joins and len(grids) < len(given):
        yield from [("float-operand", node, "one of its operands is float")] if behind else []
    elif joins:
        yield from _kernel(found, node, grids)
        if node.op_type == "Add" and from_layer:
            yield "quantized-sum", node, ""
        equal = node.op_type != "Concat" or all(grid.equals(grids[0]) for grid in grids)
        if not equal and any(each is not None and each.op_type in LAYERS for each in found.behind(node.output[0])):
            yield "concat", node, ""
