"""A prepared model as stretches of its graph that begin and end with one tensor.

A residual block is one stretch, a chain has one for each layer. Activations of all batches wait between two stretches,
once as the grids make them and once in float, so that nothing is computed twice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, fx, nn

from qat.contexts import evaluating
from qat.graph.nodes import submodule_of
from qat.inputs import Batch, Inputs, call_model, inputs_and_labels
from qat.layers import QuantFunction, QuantLayer
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.proof import traced_parts
from qat.quantizer import Quantizer
from qat.switches import switched
from qat.torch_internals import parameters_of, pytree

Values = tuple[Any, ...]
"""Values of a stretch's inputs for a few images."""

End = fx.node.Argument
"""A node whose value comes out of a stretch, or several as `fx.Node.args` holds them."""


@dataclass(frozen=True)
class Stretch:
    """A part of a graph from some of its nodes to another.

    Args:
        graph: the model, or a traced part of it.
        original: a copy of it as it was, whose quantizers are off.
        starts: the nodes whose values go in.
        end: the node whose value comes out; or several, as `fx.Node.args` holds them.
        on_grids, in_float: values of the starts, a few images each, as the graph and the original make them.
    """

    graph: PreparedGraph
    original: PreparedGraph
    starts: tuple[fx.Node, ...]
    end: End
    on_grids: list[Values]
    in_float: list[Values]

    def module(self) -> fx.GraphModule:
        """Return the stretch as a module, with the graph's own layers."""
        return between(self.graph, self.starts, self.end)

    def layers(self) -> dict[str, QuantLayer]:
        """Return its layers that own a weight and serve nowhere else, as they run."""
        inside, once = dict(self.module().named_modules()), used_once(self.graph)
        return {name: each for name, each in inside.items() if owns_weight(each) and each in once}

    def one_by_one(self) -> Iterator["Stretch"]:
        """Yield a stretch for each layer alone, with the values that reach it now."""
        inside, layers = _needed(self.starts, self.end), self.layers()
        for node in self.graph.graph.nodes:
            if node in inside and node.op == "call_module" and node.target in layers:
                starts = tuple(each for each in node.all_input_nodes if each.op != "get_attr")
                flowing = Stretch(self.graph, self.original, self.starts, starts, self.on_grids, self.in_float)
                yield Stretch(self.graph, self.original, starts, node, flowing.results(), flowing.targets())

    @torch.no_grad()
    def results(self) -> list[Any]:
        """Run the graph on its values, as it is now."""
        module = self.module()
        return [module(*values) for values in self.on_grids]

    @torch.no_grad()
    def targets(self) -> list[Any]:
        """Run the original on its own values, in float."""
        same = dict(zip(self.graph.graph.nodes, self.original.graph.nodes, strict=True))
        starts, end = fx.map_arg((self.starts, self.end), same.__getitem__)
        module = between(self.original, starts, end)
        return [module(*values) for values in self.in_float]


def owns_weight(module: nn.Module | None) -> TypeGuard[QuantLayer]:
    """Return True for a quantized layer whose weight is its own parameter."""
    own = isinstance(module, QuantLayer) and not isinstance(module, QuantFunction)
    return own and parameters_of(cast("nn.Module", module)).get("weight") is not None


def called(graph: nn.Module, node: object) -> nn.Module | None:
    """Return the module that a node calls; None for anything else."""
    return submodule_of(graph, node) if isinstance(node, fx.Node) else None


def norm_of(graph: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the BatchNorm that a layer is called with, or None."""
    norm = node.kwargs.get("norm")
    return graph.get_submodule(str(norm.target)) if isinstance(norm, fx.Node) else None


def used_once(graph: PreparedGraph) -> set[nn.Module]:
    """Return modules that one node calls or reads, with parameters of their own."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_module"]
    used = [called(graph, node) for node in nodes] + [norm_of(graph, node) for node in nodes]
    owners = Counter(parameter for module in graph.modules() for parameter in module.parameters(recurse=False))
    counts = Counter(module for module in used if module is not None)
    return {each for each, count in counts.items() if count == 1 and all(owners[p] == 1 for p in each.parameters())}


def between(graph: PreparedGraph, starts: tuple[fx.Node, ...], end: End) -> fx.GraphModule:
    """Return the part of a graph between some nodes and others, on the same modules."""
    part, needed = fx.Graph(), _needed(starts, end)
    values = {start: part.placeholder(start.name) for start in starts}
    for node in graph.graph.nodes:
        if node in needed and node not in values:
            values[node] = part.node_copy(node, values.__getitem__)
    part.output(fx.map_arg(end, values.__getitem__))
    return fx.GraphModule(graph, part)


def _needed(starts: tuple[fx.Node, ...], end: End) -> set[fx.Node]:
    found, open_nodes = set(starts), list[fx.Node]()
    fx.map_arg(end, open_nodes.append)
    while open_nodes:
        node = open_nodes.pop()
        if node not in found:  # the starts are found: nothing before them is needed
            found.add(node)
            open_nodes.extend(node.all_input_nodes)
    return found


def stretches(model: nn.Module, original: nn.Module, batches: Iterable[Batch], images: int) -> Iterator[Stretch]:
    """Yield the stretches of a model as they run; each sees the changes before it.

    Args:
        model: from `prepare`, calibrated.
        original: a copy of it as it was before any step but those before the ranges.
        batches: as for `calibrate`.
        images: how many flow together; batches are cut into pieces of so many.
    """
    inputs = [piece for batch in batches for piece in _pieces(inputs_and_labels("calibrate", batch)[0], images)]
    quantizers = [each for each in original.modules() if isinstance(each, Quantizer)]
    with evaluating(model), evaluating(original), switched(quantizers, True):
        for name, graph in traced_parts(model).items():
            plain = traced_parts(original)[name]
            on_grids, in_float = _calls(model, graph, inputs), _calls(original, plain, inputs)
            for starts, end in _cuts(graph) if on_grids else ():
                stretch = Stretch(graph, plain, starts, end, on_grids, in_float)
                yield stretch
                on_grids = [(value,) for value in stretch.results()]  # of layers as they are now
                in_float = [(value,) for value in stretch.targets()]


def _pieces(inputs: Inputs, images: int) -> list[Inputs]:
    # Inputs stay whole if their tensors do not agree on the number of images.
    if isinstance(inputs, list):  # of images, each of its own size
        return [inputs]
    leaves, structure = pytree.tree_flatten(inputs)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        return [inputs]
    cuts = [torch.split(leaf, images) if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves]
    count = next(len(cut) for cut in cuts if cut is not None)
    each = ([leaf if cut is None else cut[i] for leaf, cut in zip(leaves, cuts, strict=True)] for i in range(count))
    return [pytree.tree_unflatten(piece, structure) for piece in each]


def _calls(model: nn.Module, graph: PreparedGraph, inputs: list[Inputs]) -> list[Values]:
    found: list[Values] = []
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip((node.target for node in arguments), args, strict=False)), **kwargs}
        found.append(tuple(given.get(node.target, *node.args) for node in arguments))

    with graph.register_forward_pre_hook(note, with_kwargs=True), torch.no_grad():
        for piece in inputs:
            call_model(model, piece)
    return found


def _cuts(graph: PreparedGraph) -> Iterator[tuple[tuple[fx.Node, ...], End]]:
    # Starts and end of each stretch. A cut is behind a quantizer whose tensor is all that is read later.
    nodes = [node for node in graph.graph.nodes if node.op != "get_attr"]
    last_read = {value: place for place, node in enumerate(nodes) for value in node.all_input_nodes}
    starts = tuple(node for node in nodes if node.op == "placeholder")
    live, has_layer = set[fx.Node](), False
    for place, node in enumerate(nodes[:-1]):  # the last is the output
        live = {each for each in (*live, node) if last_read.get(each, -1) > place}
        module = called(graph, node)
        has_layer = has_layer or owns_weight(module)
        if has_layer and live == {node} and isinstance(module, Quantizer):
            yield starts, node
            starts, has_layer = (node,), False
    if has_layer:
        yield starts, nodes[-1].args[0]
