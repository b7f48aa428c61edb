"""The graph that training runs where kernels apply: quantizers with what stands before them, layers on codes.

It computes what the prepared graph computes, with the same modules and parameters. The prepared graph remains the
model; this one is derived from it at the first training step, and again after every change.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.layers import QuantLayer
from qat.layers.carrying import drop, reshape, reshape_by, shape_of
from qat.layers.chains import quantize_chain, quantize_sum
from qat.layers.codes import decode, encode, has_codes
from qat.layers.curves import quantize_curve, quantize_softmax
from qat.layers.matmuls import matmul
from qat.layers.pools import max_pool
from qat.layers.products import multiply, takes_codes
from qat.preparation.activations import NO_CLIP, Activation, activation_of
from qat.preparation.carried import DROPOUTS, RESHAPING_MODULES, asks_for_shape, reshapes, window
from qat.preparation.constants import fixed_nodes
from qat.preparation.nodes import submodule_of
from qat.preparation.operations import JOINING, changes_in_place, operation_of, passes_grid
from qat.preparation.placement import grid_of

WRITING = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)
"""Operators that write into their first operand."""

FUNCTIONAL_DROPOUTS = (F.dropout,)

MATMULS = (operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm")
"""Functions and methods that multiply the last two axes of two tensors."""


@dataclass(frozen=True)
class Taken:
    """What a quantizer takes over from the nodes before it.

    Attributes:
        source: the node whose value it starts from.
        activation: between the two, or None.
        layer: the product whose BatchNorm is taken over; then it is the source.
        operands: of a sum, or None.
    """

    source: fx.Node
    activation: Activation | None = None
    layer: fx.Node | None = None
    operands: tuple[fx.Node, fx.Node] | None = None


@dataclass(frozen=True)
class FusedForward:
    """A model's forward on codes.

    Attributes:
        run: a function of the model and its inputs.
        layers: names of the layers in it, which have to be in training mode: in evaluation they fold their norm in.
    """

    run: Callable[..., Any]
    layers: tuple[str, ...]

    def fits(self, model: nn.Module) -> bool:
        """Whether it may run now."""
        return all(model.get_submodule(name).training for name in self.layers)


def fused_forward(model: fx.GraphModule) -> FusedForward | None:
    """The model's forward on codes; None if nothing in it can be fused."""
    fusing = _Fusing(model)
    if not fusing.readers:
        return None
    code = fusing.rewritten().python_code("self")
    space: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<fused forward of a prepared model>", "exec"), space)
    return FusedForward(space["forward"], tuple(sorted({str(node.target) for node in fusing.readers})))


class _Fusing:
    """One rewriting: what is fused is decided first, then the graph is copied node by node."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model = model
        self.nodes: list[fx.Node] = list(model.graph.nodes)
        fixed = fixed_nodes(model.graph)
        self.quantizers = {
            node for node in self.nodes
            if has_codes(submodule_of(model, node)) and node not in fixed and not self._changes_later(node)
        }  # fmt: skip
        self.readers = {node for node in self.nodes if self._reads_codes(node)}
        self.matmuls = {node for node in self.nodes if self._multiplies_codes(node)}
        chains = {node: self._chain(node) for node in self.nodes if node in self.quantizers}
        self.chains = {node: chain for node, chain in chains.items() if self._is_worth_it(node, chain, chains)}
        self.carried = self._carried_as_codes()
        taken = self.chains.values()
        self.absorbed = {node for chain in taken if chain.activation is not None for node in chain.activation.nodes}
        self.absorbed |= {chain.source for chain in taken if chain.operands is not None}
        self.followed = {chain.layer for chain in self.chains.values()}
        self.graph = fx.Graph()
        self.floats: dict[fx.Node, fx.Node] = {}
        self.codes: dict[fx.Node, fx.Node] = {}

    def _changes_later(self, quantizer: fx.Node) -> bool:
        """Whether somebody writes into the quantized tensor, which its codes would not show."""
        watched = [quantizer]
        for node in watched:
            for user in node.users:
                module = submodule_of(self.model, user)
                asked = user.kwargs.get("inplace", False) or getattr(module, "inplace", False)
                if asked or user.target in WRITING or changes_in_place(user):
                    return True
                if passes_grid(user, self.model):
                    watched.append(user)
        return False

    def _grid(self, node: Any) -> fx.Node | None:
        """The fusible quantizer on whose grid a tensor lies."""
        source = grid_of(node, self.model) if isinstance(node, fx.Node) else None
        if source not in self.quantizers or any(step.target in FUNCTIONAL_DROPOUTS for step in self._way(node)):
            return None
        return source

    def _way(self, node: fx.Node) -> list[fx.Node]:
        """The operations that carry a grid through, from a tensor back to its quantizer."""
        way = []
        while passes_grid(node, self.model):
            way.append(node)
            (node, *_) = node.all_input_nodes
        return way

    def _reads_codes(self, node: fx.Node) -> bool:
        """Whether a node is a layer that can take its input as codes."""
        layer = submodule_of(self.model, node)
        return (
            isinstance(layer, QuantLayer)
            and takes_codes(layer)
            and bool(node.args)
            and self._grid(node.args[0]) is not None
            and set(node.kwargs) <= {"grid", "norm"}
        )

    def _multiplies_codes(self, node: fx.Node) -> bool:
        """Whether a node multiplies two quantized tensors."""
        return (
            node.op != "call_module"
            and node.target in MATMULS
            and len(node.args) == 2
            and not node.kwargs
            and all(self._grid(operand) is not None for operand in node.args)
        )

    def _chain(self, quantizer: fx.Node) -> Taken:
        """Walk back from a quantizer over what nobody else reads."""
        source = quantizer.args[0]
        assert isinstance(source, fx.Node)
        activation = activation_of(source, self.model)
        if activation is not None:
            source = activation.source
            if activation.curve is not None or activation.axis is not None:
                return Taken(source, activation)
        if len(source.users) == 1:
            if source in self.readers:
                return Taken(source, activation, layer=source)
            if operation_of(source, self.model, JOINING) == "add" and not source.kwargs and len(source.args) == 2:
                a, b = source.args
                if self._grid(a) is not None and self._grid(b) is not None:
                    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
                    return Taken(source, activation, operands=(a, b))
        return Taken(source, activation)

    def rewritten(self) -> fx.Graph:
        """The new graph."""
        for node in self.nodes:
            if node in self.absorbed:
                continue
            if node in self.readers:
                self.floats[node] = self._product(node)
            elif node in self.matmuls:
                operands = [self._coded(operand) for operand in node.all_input_nodes]
                self.floats[node] = self.graph.call_function(matmul, (operands[0], operands[-1]))
            elif node in self.chains:
                self.codes[node] = self._quantized(node)
            elif node in self.carried:
                self.codes[node] = self._encoded(node, self._carry(node))
            else:
                self.floats[node] = self.graph.node_copy(node, self._shape if asks_for_shape(node) else self._float)
        self.graph.set_codegen(self.model.graph._codegen)
        self.graph.lint()
        return self.graph

    def _carried_as_codes(self) -> set[fx.Node]:
        """Max pools, reshapings and dropouts behind which somebody reads codes."""
        return {
            step
            for node in self._read(self.chains)
            for step in self._way(node)
            if step.args and self._grid(step) in self.chains and self._takes_codes(step)
        }

    def _takes_codes(self, node: fx.Node) -> bool:
        """Whether an operation that carries a grid through can do so with codes."""
        module = submodule_of(self.model, node)
        if module is not None:
            return isinstance(module, (*DROPOUTS, *RESHAPING_MODULES)) or window(node, module) is not None
        return reshapes(node) is not None or window(node, None) is not None

    def _is_worth_it(self, quantizer: fx.Node, chain: Taken, chains: dict[fx.Node, Taken]) -> bool:
        """Whether a quantizer takes a norm or a sum over, or is read as codes; else it is one pass as it is."""
        if chain.operands is not None or (chain.layer is not None and chain.layer.kwargs.get("norm") is not None):
            return True
        return any(self._grid(node) is quantizer for node in self._read(chains))

    def _read(self, chains: dict[fx.Node, Taken]) -> list[fx.Node]:
        """Nodes that somebody reads as codes."""
        read = [reader.args[0] for reader in self.readers]
        read += [operand for product in self.matmuls for operand in product.args]
        read += [operand for chain in chains.values() for operand in chain.operands or ()]
        return [node for node in read if isinstance(node, fx.Node)]

    def _float(self, node: fx.Node) -> fx.Node:
        """The node's float tensor in the new graph."""
        if node not in self.floats:
            self.floats[node] = self.graph.call_function(decode, (self.codes[node],))
        return self.floats[node]

    def _coded(self, node: fx.Node) -> fx.Node:
        """The node's codes in the new graph."""
        if node not in self.codes:
            self.codes[node] = self._encoded(node, self._float(node))
        return self.codes[node]

    def _encoded(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """The node's value in the new graph as codes, unless a dropout took it off its grid."""
        quantizer = self._grid(node)
        assert quantizer is not None
        grid = self.graph.get_attr(str(quantizer.target))
        dropouts = [step for step in self._way(node) if isinstance(submodule_of(self.model, step), DROPOUTS)]
        checked = [self.graph.get_attr(str(step.target)) for step in dropouts]
        return self.graph.call_function(encode, (value, grid, *checked))

    def _carry(self, node: fx.Node) -> fx.Node:
        """A max pool, a reshaping or a dropout of codes."""
        x, *args = node.args
        assert isinstance(x, fx.Node)
        coded, module = self._coded(x), submodule_of(self.model, node)
        held = None if module is None else self.graph.get_attr(str(node.target))
        pooled = window(node, module)
        if pooled is not None:
            return self.graph.call_function(max_pool, (coded, tuple(pooled), held))
        if isinstance(module, DROPOUTS):
            return self.graph.call_function(drop, (coded, held))
        if module is not None:
            return self.graph.call_function(reshape_by, (coded, held))
        given = fx.node.map_arg((tuple(args), dict(node.kwargs)), self._float)
        return self.graph.call_function(reshape, (coded, reshapes(node), *given[0]), given[1])

    def _shape(self, node: fx.Node) -> fx.Node:
        """Something of the node's shape."""
        if node in self.floats:
            return self.floats[node]
        return self.graph.call_function(shape_of, (self.codes[node],))

    def _product(self, node: fx.Node) -> fx.Node:
        """A layer on codes; its BatchNorm follows, unless a chain takes it over."""
        x, *operands = node.args
        assert isinstance(x, fx.Node)
        layer, grid = self.graph.get_attr(str(node.target)), self.floats[node.kwargs["grid"]]  # type: ignore[index]
        others = [self._float(operand) if isinstance(operand, fx.Node) else operand for operand in operands]
        y = self.graph.call_function(multiply, (layer, self._coded(x), grid, *others))
        norm = node.kwargs.get("norm")
        if isinstance(norm, fx.Node) and node not in self.followed:
            y = self.graph.call_module(str(norm.target), (y,))
        return y

    def _quantized(self, node: fx.Node) -> fx.Node:
        """A quantizer with what it takes over."""
        chain, activation = self.chains[node], self.chains[node].activation
        quantizer, module = self.graph.get_attr(str(node.target)), None
        if activation is not None and activation.module is not None:
            module = self.graph.get_attr(activation.module)
        bounds = NO_CLIP if activation is None else activation.bounds
        if chain.operands is not None:
            a, b = map(self._coded, chain.operands)
            return self.graph.call_function(quantize_sum, (a, b, quantizer, *bounds, module))
        source = self._float(chain.source)
        if activation is not None and activation.curve is not None:
            return self.graph.call_function(quantize_curve, (source, quantizer, activation.curve, module))
        if activation is not None and activation.axis is not None:
            arguments = (source, quantizer, activation.axis, activation.multiplier, module)
            return self.graph.call_function(quantize_softmax, arguments)
        norm = chain.layer.kwargs.get("norm") if chain.layer is not None else None
        norm = self.floats[norm] if isinstance(norm, fx.Node) else None
        return self.graph.call_function(quantize_chain, (source, quantizer, norm, *bounds, module))
