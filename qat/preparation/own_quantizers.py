"""Quantizers of one's own: of layers that were quantized by hand, and those that forward calls itself.

Each becomes a call in the graph, in front of the layer that holds it. Placement then takes it for what its tensor is to
be quantized with, or leaves it behind the tensor's quantizer. It keeps its name in the state dict, and its range.
"""

from collections import Counter

import torch
from torch import fx

from qat.layers import QuantLayer
from qat.preparation.operations import grid_of
from qat.quantizer import Quantizer
from qat.tracing.nodes import FACTS, submodule_of


def call_own_quantizers(graph_module: fx.GraphModule) -> None:
    """Call the quantizers that quantized layers hold in the graph: conv(x) becomes conv(conv.input_quantizer(x))."""
    for node in list(graph_module.graph.nodes):
        layer = submodule_of(graph_module, node)
        if not isinstance(layer, QuantLayer):
            continue
        for keyword, operand in zip(layer.quantizer_arguments, node.args, strict=False):
            if getattr(layer, keyword) is not None and keyword not in node.kwargs:
                with graph_module.graph.inserting_before(node):
                    call = graph_module.graph.call_module(f"{node.target}.{keyword}", (operand,))
                call.meta = {key: value for key, value in operand.meta.items() if key == FACTS}
                node.replace_input_with(operand, call)


def drop_repeated(graph_module: fx.GraphModule) -> None:
    """Drop calls of quantizers on tensors that lie on the same grid already; a layer then shares the first one."""
    nodes = list(graph_module.graph.nodes)
    calls = Counter(str(node.target) for node in nodes if node.op == "call_module")
    for node in nodes:
        mine = submodule_of(graph_module, node)
        before = grid_of(node.args[0], graph_module) if isinstance(mine, Quantizer) else None
        if before is None:
            continue
        first = submodule_of(graph_module, before)
        assert isinstance(first, Quantizer) and isinstance(mine, Quantizer)
        if first is mine or (calls[str(node.target)] == 1 and are_equal(first, mine)):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
            graph_module.set_submodule(str(node.target), first)


def are_equal(a: Quantizer, b: Quantizer) -> bool:
    """Whether two quantizers have the same spec and the same range."""
    states = zip(a.state_dict().values(), b.state_dict().values(), strict=False)
    return a is b or (a.spec == b.spec and all(x.is_meta or torch.equal(x, y) for x, y in states))
