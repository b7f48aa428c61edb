"""Changes without which ONNX Runtime would compute another function, or in float.

Exact sums. Its QLinearAdd computes (a - za) * (sa / s) + (b - zb) * (sb / s) in an order of its own. Where the result
lies within rounding of a tie, its integer is one off. Of 256 levels that is little; but of 8 levels, or where a
quantizer of 8 levels stands behind it, it is an eighth of the range: at 3 bits 2 of ResNet-20's 1,000 predictions were
others. The operator `Sum` has no integer kernel, so the runtime adds the dequantized values in float32, as torch does:
all logits are then equal bit by bit. It costs passes over floats: all sums so, ResNet-20 and ResNet-18 take 13 %
longer, MobileNetV2 3 % (AMD EPYC with VNNI, one thread). So sums that are read as 8 bits stay integer ones unless all
are asked for; at 8 bits they once changed 2 predictions of 1,000 too.

Clips of integers. ONNX Runtime drops a Clip (ReLU, ReLU6) between a convolution and its quantizer only if the integers
end where the Clip does. Those of fewer than 8 bits lie in a container of 8, and a trained range may be wider than
ReLU6's: then it keeps the Clip and computes the convolution in float. But rounding keeps the order of numbers, so
Q(clip(x, low, high)) = clip(Q(x), Q(low), Q(high)) for every x.

Barriers, an operator without effect where the runtime's optimisation would compute another function:

- Of `QuantizeLinear, DequantizeLinear, QuantizeLinear, DequantizeLinear` with two grids, `DoubleQDQPairsRemover` makes
  one pair, whose range is the intersection of both: every value is rounded to a third grid.
- A Conv, ConvTranspose or Gemm with a float weight between DequantizeLinear and QuantizeLinear is taken for one whose
  weight was forgotten: `WeightBiasQuantization` rounds it to int8, with one scale for the whole tensor. But such a
  layer is one that the recipe leaves in float.
- QLinearSoftmax takes floor(1 / scale) for the scale of its result: up to a fifth of the integers were others. Softmax
  in float takes less than half its time (8 x 12 x 197 x 197, AVX-512, one thread), the barrier included.
- QLinearAveragePool with ceil_mode divides by values beyond the margin too, unless it counts no margin at all.

None looks through a LeakyRelu of slope 1, which returns its input on every runtime. Between two grids it becomes a
table of 256 integers; in front of a float layer it is a pass over the layer's input.

These are passes over the ONNX graph. Before it is made, `rewrite_for_runtime` states grids again in the torch graph
where the runtime loses them, and puts its global average in place of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch.nn.functional as F
from torch import fx, nn

from qat.export.onnx.graph import Array, Edges, copy_of, ends_within, insert, store, unused_name
from qat.export.onnx.operators import GlobalAveragePool, OnnxOperations
from qat.graph.nodes import FACTS, constant_nodes, dimensions, is_call, submodule_of
from qat.graph.operations import AVERAGING, calls_where
from qat.integers.freezing import replace_call
from qat.integers.frozen import FrozenQuantizer, stored_offset
from qat.preparation.operations import grid_of, operation_of, passes_grid
from qat.quantizer import Quantizer

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

MOVING = (
    "Identity", "Dropout", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand",
    "MaxPool", "Relu", "Clip",
)  # fmt: skip
"""Operators that the runtime removes, or moves a quantizer across, so that those around them become neighbours."""

LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators whose float weight the runtime would quantize; of MatMul and the Add of a bias it makes a Gemm."""

THROUGH = {*MOVING, "QuantizeLinear", "DequantizeLinear"}
"""Operators that may stand between a sum and a quantizer of few bits."""

LARGEST_RATIO = 256
"""Largest scale of an operand in scales of the result: far above it QLinearAdd's 32-bit integers overflow."""

LEVELS = (np.array(0, np.uint8), np.array(255, np.uint8))
"""The lowest and highest integer of uint8."""

QuantizedReader: TypeAlias = "tuple[NodeProto, NodeProto | None, list[Array]]"
"""A QuantizeLinear on one constant grid, the Clip of its integers if it has one, and the grid."""

NOT_PROPAGATED = calls_where(lambda row: not row.propagated)
"""Operations that keep a grid although ONNX Runtime does not propagate it: it would compute the next operation in
float, or quantize its input anew in blocks of its own."""


def add_exactly(proto: ModelProto, *, everywhere: bool = False) -> None:
    """Write sums onto grids of few bits, or far finer than their operands', as `Sum`.

    Args:
        proto: an exported file, whose quantizers of fewer than 8 bits end with a Clip of integers; it is changed.
        everywhere: every sum that a quantizer reads, whatever its bits.
    """
    edges = Edges(proto.graph)
    clipped = {node.input[0] for node in proto.graph.node if node.op_type == "Clip"}
    for node in proto.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        before = edges.maker(edges.source(node.input[0], THROUGH), "Add")
        if before is None:
            continue
        grids = [each for name in before.input if (each := _grid_of(name, edges))]
        scales = [edges.stored[each.input[1]].max() for each in (*grids, node) if each.input[1] in edges.stored]
        # A Clip of integers shows fewer than 8 bits.
        if everywhere or node.output[0] in clipped or max(scales) > LARGEST_RATIO * scales[-1]:
            before.op_type = "Sum"


def fold_clips(proto: ModelProto, *, of_floats: bool = False) -> None:
    """Clip the integers of quantizers instead of the floats that nothing else reads.

    Those that ONNX Runtime drops by itself stay. An integer Clip is added in uint8 alone: the int8 grids of TensorRT,
    which reads no such Clip, keep theirs in float.

    Args:
        proto: an exported file, whose quantizers of fewer than 8 bits end with a Clip of integers; it is changed.
        of_floats: afterwards clip the floats in front of all quantizers: TensorRT reads no Clip of integers.
    """
    graph, edges = proto.graph, Edges(proto.graph)
    for node in list(graph.node):
        limits = edges.limits(node)
        readers = edges.read_by.get(node.output[0], []) if limits else []
        found = [known for each in readers if (known := _integers_of(each, edges)) is not None]
        if limits is None or not found or len(found) < len(readers):
            continue
        if all(clip is None and ends_within(limits, grid) for _, clip, grid in found):
            continue
        for quantizer, clip, grid in found:
            quantizer.input[0] = node.input[0]
            bounds = _narrowed(limits, (clip and edges.pair(clip)) or LEVELS, grid)
            if clip is None and bounds == list(LEVELS):
                continue  # the container clips as much
            clip = clip or _added_clip(graph, quantizer)
            for place, name, value in zip((1, 2), ("low", "high"), bounds, strict=True):
                clip.input[place] = store(graph, f"{clip.output[0]}.{name}_clipped", value)
        graph.node.remove(node)
    if of_floats:
        _clip_floats(graph)


def _integers_of(node: NodeProto | None, edges: Edges) -> QuantizedReader | None:
    if node is None or node.op_type != "QuantizeLinear":
        return None
    grid, clip = edges.pair(node), edges.reader(node.output[0])
    if grid is None or any(len(np.unique(part)) != 1 for part in grid):
        return None
    if clip is None or clip.op_type != "Clip":
        return (node, None, grid) if grid[1].dtype == np.uint8 else None
    return (node, clip, grid) if edges.pair(clip) is not None else None


def _added_clip(graph: GraphProto, quantizer: NodeProto) -> NodeProto:
    from onnx import helper

    name = quantizer.output[0]
    place = list(graph.node).index(quantizer) + 1
    quantizer.output[0] = f"{name}.unclipped"  # the clipped integers keep the quantizer's name, for compare_layers
    insert(graph, place, helper.make_node("Clip", [quantizer.output[0], "", ""], [name], name=f"{name}.clip"))
    added: NodeProto = graph.node[place]  # a copy of what was inserted
    return added


def _narrowed(limits: Sequence[Array], integers: Sequence[Array], grid: Sequence[Array]) -> list[Array]:
    # The bounds of the integers, narrowed to what the limits of the floats are quantized to.
    scale, zero_point = grid[0].reshape(-1)[0], grid[1].reshape(-1)[0]
    low, high = (int(bound) for bound in integers)
    with np.errstate(over="ignore"):  # a bound of infinity, or of the largest float
        ends = [np.clip(np.rint(limit / scale) + np.float32(zero_point), low, high) for limit in limits]
    return [np.array(end, integers[0].dtype).reshape(integers[0].shape) for end in ends]


def _clip_floats(graph: GraphProto) -> None:
    # The integers are the same: Q((low - zero_point) * scale) = low, and rounding keeps the order of numbers.
    edges = Edges(graph)
    for clip in [node for node in graph.node if node.op_type == "Clip"]:
        quantizer = edges.maker(clip.input[0], "QuantizeLinear")
        if quantizer is None:
            continue
        scale, zero_point = (edges.stored[name].astype(np.float32) for name in quantizer.input[1:3])
        clipped, bounds = f"{clip.output[0]}.clipped", clip.input[1:3]
        for place, bound in enumerate(bounds, 1):
            clip.input[place] = store(graph, f"{bound}.{clipped}", (edges.stored[bound] - zero_point) * scale)
        quantizer.output[0], clip.output[0] = clip.output[0], clipped  # the integers keep their name
        clip.input[0], quantizer.input[0] = quantizer.input[0], clipped
        moved = copy_of(clip)
        graph.node.remove(clip)
        insert(graph, list(graph.node).index(quantizer), moved)


def add_barriers(proto: ModelProto) -> None:
    """Insert a LeakyRelu of slope 1 before quantizers and float layers fused wrongly."""
    from onnx import helper

    graph, edges = proto.graph, Edges(proto.graph)
    for place, node in reversed(list(enumerate(graph.node))):  # from the end, so that places stay true
        if node.op_type == "QuantizeLinear":
            needed = _requantizes(node, edges) or _ends_otherwise(node, edges)
        else:
            stored = node.op_type in LAYERS and edges.source(node.input[1], MOVING) in edges.stored
            needed = stored and _grid_of(node.input[0], edges) is not None  # it multiplies by floats
        if needed:
            barrier = unused_name(graph, f"{node.input[0]}.barrier")
            insert(graph, place, helper.make_node("LeakyRelu", node.input[:1], [barrier], name=barrier, alpha=1.0))
            graph.node[place + 1].input[0] = barrier


def _requantizes(quantizer: NodeProto, edges: Edges) -> bool:
    before = _grid_of(quantizer.input[0], edges)
    if before is None or any(name not in edges.stored for name in before.input[1:]):
        return False  # the rows of a table bring their scales; only constant grids are merged
    grids = [[edges.stored[name] for name in each.input[1:]] for each in (before, quantizer)]
    return not all(np.array_equal(ours, theirs) for ours, theirs in zip(*grids, strict=True))


def _ends_otherwise(quantizer: NodeProto, edges: Edges) -> bool:
    # True if it is fused with the operator before it into one that computes another function.
    before = edges.made.get(edges.source(quantizer.input[0], MOVING))
    options = {each.name for each in before.attribute if each.i} if before is not None else set()
    return bool(options >= {"ceil_mode", "count_include_pad"} or (before is not None and before.op_type == "Softmax"))


def _grid_of(name: str, edges: Edges) -> NodeProto | None:
    # The DequantizeLinear of the activation whose values a tensor holds.
    node = edges.maker(edges.source(name, MOVING), "DequantizeLinear")
    return node if node is not None and node.input[0] not in edges.stored else None


def rewrite_for_runtime(model: nn.Module, operations: OnnxOperations) -> None:
    """State grids again where the runtime loses them, and use its global average."""
    for path, graph_module in list(model.named_modules()):
        if isinstance(graph_module, fx.GraphModule):
            _rewrite(graph_module, path, operations)


def _rewrite(model: fx.GraphModule, path: str, operations: OnnxOperations) -> None:
    constant = constant_nodes(model.graph)
    nodes = list(model.graph.nodes)
    # Both questions are asked before the graph changes: a grid that is stated again hides the quantizer before it.
    restated = {node: source for node in nodes if (source := _grid_to_restate(node, model)) is not None}
    averages = [
        node for node in nodes if node not in constant and _is_global_average(node, model) and _scales_fit(node, model)
    ]
    for number, (node, source) in enumerate(restated.items()):
        quantizer = submodule_of(model, source)
        assert isinstance(quantizer, Quantizer)
        again = FrozenQuantizer(quantizer, f"{path}.{source.target}.again".lstrip("."), operations)
        model.add_submodule(f"restated_{number}", again)
        with node.graph.inserting_after(node):
            call = node.graph.call_module(f"restated_{number}")
        node.replace_all_uses_with(call)
        call.args = (node,)
    for number, node in enumerate(averages):
        average = GlobalAveragePool(operations.opset, dimensions(node) == 2)
        replace_call(model, node, f"global_average_pool_{number}", average, node.args[:1])


def _grid_to_restate(node: fx.Node, model: fx.GraphModule) -> fx.Node | None:
    # The quantizer to call again behind an operation that keeps its grid, where ONNX Runtime loses it. These are the
    # operations in `NOT_PROPAGATED`, and for a grid in int8 also max pooling and reshaping: there ONNX Runtime 1.31
    # writes a zero point of the wrong type and then refuses its own graph.
    if not passes_grid(node, model) or node.meta.get(FACTS, ()) is None:  # the pieces of a split are stated each
        return None
    source = grid_of(node, model)
    if source is None:
        return None
    quantizer = model.get_submodule(str(source.target))
    assert isinstance(quantizer, Quantizer)
    in_int8 = quantizer.bounds()[0] < 0 and not stored_offset(quantizer)
    lost = is_call(node, *NOT_PROPAGATED, model)
    return source if lost or in_int8 else None


def _is_global_average(node: fx.Node, model: fx.GraphModule) -> bool:
    module = submodule_of(model, node)
    size: object = module.output_size if isinstance(module, nn.AdaptiveAvgPool2d) else None
    if node.target is F.adaptive_avg_pool2d:
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
    return size in (1, (1, 1), [1, 1]) or operation_of(node, model, {"mean": AVERAGING["mean"]}) == "avg_pool"


def _scales_fit(node: fx.Node, model: fx.GraphModule) -> bool:
    # ONNX Runtime's integer average needs a ratio of scales below 256 and at least 2^-32.
    source = grid_of(node.args[0], model) if isinstance(node.args[0], fx.Node) else None
    reader = next((user for user in node.users if isinstance(submodule_of(model, user), Quantizer)), None)
    if source is None or reader is None:
        return True  # without a grid on both sides it stays a float operation
    before, after = (model.get_submodule(str(end.target)) for end in (source, reader))
    assert isinstance(before, Quantizer) and isinstance(after, Quantizer)
    # ONNX Runtime divides the ratio by the number of pixels. Without that, 256 is a safe upper bound; the lower bound
    # leaves room for 2^16 pixels.
    ratio = float(before.grid()[0]) / float(after.grid()[0])
    return 2.0**-16 <= ratio < 256
