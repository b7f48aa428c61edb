"""Arguments that a call may leave out, such as labels, and what needs them."""

import copy
import operator

from torch import Tensor, fx, nn

from qat.contexts import evaluating
from qat.graph.capture import check_answer
from qat.graph.nodes import FACTS, free_name, submodule_of
from qat.graph.sizes import EXPECTATIONS
from qat.inputs import Examples
from qat.torch_internals import children_of


class ByMode(nn.Module):
    """Returns the first of two values in training, the second in evaluation."""

    def forward(self, training: object, evaluation: object) -> object:
        """Return the value for the present mode."""
        return training if self.training else evaluation


class WhenGiven(nn.Module):
    """Computes a part of a graph from an argument; without it, its results are None."""

    def __init__(self, part: fx.GraphModule, results: int) -> None:
        super().__init__()
        self.part, self.results = part, results

    def forward(self, given: Tensor | None, *others: object) -> tuple[object, ...]:
        """Return the results of the part."""
        return (None,) * self.results if given is None else tuple(self.part(given, *others))


def leave_out(graph_module: fx.GraphModule, model: nn.Module, examples: Examples) -> None:
    """Let calls leave out optional tensors that not every result needs, in place.

    This is done for an argument if the model, called without it, returns the same other results.
    """
    for name in [node.target for node in graph_module.graph.find_nodes(op="placeholder") if node.args == (None,)]:
        if not isinstance(examples.get(str(name)), Tensor):
            continue
        graph, kept = copy.deepcopy(graph_module.graph), set(children_of(graph_module))
        try:
            if _split(graph_module, str(name)):
                fewer = {key: value for key, value in examples.items() if key != name}
                with evaluating(model):
                    for given in (fewer, examples):  # the last notes the facts
                        check_answer(model, given, graph_module.graph, owner=graph_module)
        except Exception:  # forward needs it
            graph_module.graph = graph
            for added in children_of(graph_module).keys() - kept:
                delattr(graph_module, added)


def _packs_results(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    packs = isinstance(node.target, type) or isinstance(submodule_of(graph_module, node), ByMode)
    return node.op == "output" or packs


def _split(graph_module: fx.GraphModule, name: str) -> bool:
    # Move what depends on an argument into a module of its own; False if every result depends on it.
    graph = graph_module.graph
    argument = next(node for node in graph.find_nodes(op="placeholder") if node.target == name)
    inside: dict[fx.Node, None] = {}
    for node in graph.nodes:
        follows = any(source is argument or source in inside for source in node.all_input_nodes)
        if follows and node.target not in EXPECTATIONS and not _packs_results(node, graph_module):
            inside[node] = None
            module = submodule_of(graph_module, node)
            if module is not None and any(True for _ in module.parameters()):
                return False
    ends = [node for node in graph.nodes if _packs_results(node, graph_module)]
    results = [node for node in inside if any(user not in inside for user in node.users)]
    others = {source for end in ends for source in end.all_input_nodes} - set(inside) - set(ends)
    if not results or not any(node.meta.get(FACTS) for node in others):
        return False
    read = dict.fromkeys(source for node in inside for source in node.all_input_nodes)
    inputs = [source for source in read if source not in inside and source is not argument]
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in (argument, *inputs):
        copies[source] = part.placeholder(source.name)
    for node in inside:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output([copies[node] for node in results])
    place = free_name(graph_module, f"when_{name}_given")
    graph_module.add_submodule(place, WhenGiven(fx.GraphModule(graph_module, part), len(results)))
    with graph.inserting_before(ends[0]):
        call = graph.call_module(place, (argument, *inputs))
        for number, node in enumerate(results):
            found = graph.call_function(operator.getitem, (call, number))
            found.meta |= node.meta
            node.replace_all_uses_with(found, lambda user: user in ends)
    for node in reversed(list(inside)):
        graph.erase_node(node)
    return True
