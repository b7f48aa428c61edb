"""On how many bits each weight of a model is computed."""

from collections.abc import Iterator
from operator import attrgetter

from torch import fx, nn

from qat.quantizer.base import Quantizer


def weight_bits(model: nn.Module) -> dict[int, int]:
    """The fewest bits of the grids on which a parameter is computed, by its id; without those computed in float.

    A layer's quantizer stands for all of its parameters, those of a parametrization too. Where the graph of a prepared
    model calls a function with a weight that lies elsewhere (`F.linear(x, self.qkv.weight)`), the weight is followed
    back through the graph.
    """
    found: dict[int, int] = {}
    for module in model.modules():
        quantizers = list(_weight_quantizers(module))
        pairs = [(p, quantizer) for p in module.parameters() for quantizer in quantizers]
        if isinstance(module, fx.GraphModule):
            pairs += _read_by_functions(module)
        for parameter, quantizer in pairs:
            found[id(parameter)] = min(found.get(id(parameter), quantizer.spec.bits), quantizer.spec.bits)
    return found


def _weight_quantizers(module: nn.Module) -> Iterator[Quantizer]:
    """Those that a layer owns; attention and recurrent layers have them in the functions that they are made of."""
    for each in module.modules() if hasattr(module, "inner_weights") else module.children():
        if isinstance(each, Quantizer) and each.role == "weight":
            yield each


def _read_by_functions(model: fx.GraphModule) -> list[tuple[nn.Parameter, Quantizer]]:
    """The parameters from which quantized functions of the graph get their weight, its second argument."""
    found = []
    for node in model.graph.nodes:
        if node.op == "call_module" and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
            quantizers = list(_weight_quantizers(model.get_submodule(str(node.target))))
            values = [attrgetter(str(each.target))(model) for each in _origins(node.args[1])] if quantizers else []
            found += [(v, quantizer) for v in values if isinstance(v, nn.Parameter) for quantizer in quantizers]
    return found


def _origins(node: fx.Node) -> set[fx.Node]:
    """The attributes of the model that a value is computed from."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += each.all_input_nodes
    return {each for each in seen if each.op == "get_attr"}
