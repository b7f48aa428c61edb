"""Layers of one's own whose results no quantizer reads: a runtime computes them in float."""

import copy
from collections.abc import Iterator

from torch import fx, nn

from qat.preparation.operations import is_relu
from qat.preparation.placement import is_convolution, readings
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.report import LEFT_IN_FLOAT
from qat.preparation.swapping import call_own_quantizers
from qat.quantizer import Quantizer
from qat.torch_internals import AnyBatchNorm
from qat.tracing.nodes import submodule_of
from qat.tracing.side_effects import UntraceableError
from qat.tracing.train_eval import trace


def float_results(model: nn.Module) -> list[str]:
    """The convolutions of an unprepared model that compute in float in an exported file.

    Integer kernels need the grid of their result, right behind the activation. A BatchNorm in between does not fold
    without `prepare`, either. Of a model that cannot be traced these are all convolutions but those that are modules by
    themselves.
    """
    if any(isinstance(module, PreparedGraph) or LEFT_IN_FLOAT in vars(module) for module in model.modules()):
        return []
    named = [name for name, module in model.named_modules() if name and is_convolution(module)]
    if not named:
        return []
    try:
        graph_module, _ = trace(copy.deepcopy(model), None, fx.GraphModule)
    except UntraceableError:
        return named
    call_own_quantizers(graph_module)
    nodes = (node for node in graph_module.graph.nodes if is_convolution(submodule_of(graph_module, node)))
    return list(dict.fromkeys(str(node.target) for node in nodes if any(_float_readers(node, graph_module))))


def _float_readers(node: fx.Node, graph_module: fx.GraphModule, normalised: bool = False) -> Iterator[bool]:
    """For each reader of a result, behind norms and ReLUs: whether the result is not read as it is by a quantizer.

    An output of the model is no such reader: `prepare` leaves it in float too.
    """
    for reader, _ in readings(node, graph_module):
        module = submodule_of(graph_module, reader)
        if is_relu(reader, graph_module) or isinstance(module, AnyBatchNorm):
            yield from _float_readers(reader, graph_module, normalised or isinstance(module, AnyBatchNorm))
        else:
            yield reader.op != "output" and (normalised or not isinstance(module, Quantizer))


def said_of(names: list[str]) -> str:
    """A sentence about `float_results`, with the way out."""
    named = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
    return (
        f"{named} {'computes' if len(names) == 1 else 'compute'} in float in an exported file, since no quantizer reads"
        " the result right behind norm and activation; qat.prepare(model) keeps your layers with their ranges, and"
        " places what is missing"
    )
