"""Changes of a graph for ONNX Runtime: grids stated again, global averages."""

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.export.onnx.operators import GlobalAveragePool, OnnxOperations
from qat.graph.nodes import FACTS, constant_nodes, dimensions, submodule_of
from qat.integers.freezing import replace_call
from qat.integers.frozen import FrozenQuantizer, stored_offset
from qat.preparation.operations import AVERAGING, grid_of, operation_of, passes_grid
from qat.quantizer import Quantizer

NOT_PROPAGATED = {
    F.pad, F.adaptive_max_pool2d, operator.getitem, torch.roll, torch.repeat_interleave, torch.select, torch.narrow,
    torch.pixel_shuffle, torch.channel_shuffle, "roll", "expand", "repeat", "repeat_interleave", "select", "narrow",
}  # fmt: skip
"""Operations that keep a grid although ONNX Runtime does not propagate it: it would compute the next operation in
float, or quantize its input anew in blocks of its own."""

NOT_PROPAGATED_MODULES = (
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.ChannelShuffle, nn.PixelShuffle,
    nn.PixelUnshuffle,
)  # fmt: skip
"""The same operations as modules."""


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
    lost = node.target in NOT_PROPAGATED or isinstance(submodule_of(model, node), NOT_PROPAGATED_MODULES)
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
