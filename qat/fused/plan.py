"""What of a prepared graph runs on codes in training: decided here, done in `qat.fused.rewriting`."""

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from qat.fused.activations import Activation, activation_of
from qat.fused.functions.codes import has_codes, in_force
from qat.fused.functions.products import takes_codes
from qat.fused.known_modules import may_stand_in
from qat.fused.movement import DROPOUTS, RESHAPING_MODULES, reshapes, window
from qat.layers import QuantLayer
from qat.preparation.hooks import may_write
from qat.preparation.operations import JOINING, operation_of, passes_grid
from qat.preparation.placement import grid_of
from qat.tracing.constants import fixed_nodes
from qat.tracing.in_place import Memory
from qat.tracing.nodes import submodule_of

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


class CodesPlan:
    """What is fused, of which graph.

    Args:
        model: a prepared model in training.
        distrusted: names of modules that kernels do not stand in for, whatever they are.

    Attributes:
        quantizers: nodes whose output can be held as codes.
        readers: layers that take codes.
        matmuls: products of two quantized tensors.
        chains: of a quantizer that is computed with what stands before it, what that is.
        carried: operations on codes that compute nothing, such as reshapings.
        absorbed: nodes that a chain computes.
        followed: layers whose BatchNorm a chain computes.
    """

    def __init__(self, model: fx.GraphModule, distrusted: Collection[str] = ()) -> None:
        self.model, self.distrusted = model, distrusted
        self.nodes: list[fx.Node] = list(model.graph.nodes)
        self.memory = Memory(model, model.graph)
        fixed = fixed_nodes(model.graph)
        self.quantizers = {node for node in self.nodes if node not in fixed and self._makes_codes(node)}
        self.readers = {node for node in self.nodes if self._reads_codes(node)}
        self.matmuls = {node for node in self.nodes if self._multiplies_codes(node)}
        chains = {node: self._chain(node) for node in self.nodes if node in self.quantizers}
        self.chains = {node: chain for node, chain in chains.items() if self._is_worth_it(node, chain, chains)}
        self.carried = self._carried_as_codes()
        taken = self.chains.values()
        self.absorbed = {node for chain in taken if chain.activation is not None for node in chain.activation.nodes}
        self.absorbed |= {chain.source for chain in taken if chain.operands is not None}
        self.followed = {chain.layer for chain in self.chains.values() if self._norm_may_follow(chain)}

    def grid(self, node: Any) -> fx.Node | None:
        """The fusible quantizer on whose grid a tensor lies."""
        source = grid_of(node, self.model) if isinstance(node, fx.Node) else None
        if source not in self.quantizers:
            return None
        leaves = any(
            step.target in FUNCTIONAL_DROPOUTS or (step.op == "call_module" and not self.stands_in(step))
            for step in self.way(node)
        )
        return None if leaves else source

    def way(self, node: fx.Node) -> list[fx.Node]:
        """The operations that carry a grid through, from a tensor back to its quantizer."""
        way = []
        while passes_grid(node, self.model):
            way.append(node)
            (node, *_) = node.all_input_nodes
        return way

    def stands_in(self, node: fx.Node) -> bool:
        """Whether kernels may compute what a call of this node's module would."""
        return may_stand_in(submodule_of(self.model, node)) and str(node.target) not in self.distrusted

    def _makes_codes(self, node: fx.Node) -> bool:
        """Whether a node is a quantizer whose output may be codes: nobody writes into it, which they would not show."""
        module: Any = submodule_of(self.model, node)
        if not (has_codes(module) and in_force(module) and self.stands_in(node)):
            return False
        readers = self.memory.readers(node)
        return not self.memory.writers(node) and not any(may_write(submodule_of(self.model, each)) for each in readers)

    def _reads_codes(self, node: fx.Node) -> bool:
        """Whether a node is a layer that can take its input as codes."""
        layer = submodule_of(self.model, node)
        return (
            isinstance(layer, QuantLayer)
            and takes_codes(layer)
            and self.stands_in(node)
            and bool(node.args)
            and self.grid(node.args[0]) is not None
            and {"input_quantizer"} <= set(node.kwargs) <= {"input_quantizer", "norm"}
        )

    def _multiplies_codes(self, node: fx.Node) -> bool:
        """Whether a node multiplies two quantized tensors."""
        return (
            node.op != "call_module"
            and node.target in MATMULS
            and len(node.args) == 2
            and not node.kwargs
            and all(self.grid(operand) is not None for operand in node.args)
        )

    def _chain(self, quantizer: fx.Node) -> Taken:
        """Walk back from a quantizer over what nobody else reads."""
        source = quantizer.args[0]
        assert isinstance(source, fx.Node)
        activation = self._activation(source)
        if activation is not None:
            source = activation.source
            if activation.curve is not None or activation.axis is not None:
                return Taken(source, activation)
        if len(source.users) == 1:
            if source in self.readers:
                return Taken(source, activation, layer=source)
            if operation_of(source, self.model, JOINING) == "add" and not source.kwargs and len(source.args) == 2:
                a, b = source.args
                if self.grid(a) is not None and self.grid(b) is not None:
                    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
                    return Taken(source, activation, operands=(a, b))
        return Taken(source, activation)

    def _activation(self, node: fx.Node) -> Activation | None:
        """What a quantizer may compute together with itself, later than the node does: nobody notices that."""
        found = activation_of(node, self.model)
        if found is None or found.module in self.distrusted or not self.memory.can_wait(found.source, found.nodes):
            return None
        # The source is kept for the backward; who is given it as an answer may write there before.
        returned = any(reader.op == "output" for reader in self.memory.readers(found.source))
        return None if returned else found

    def _carried_as_codes(self) -> set[fx.Node]:
        """Max pools, reshapings and dropouts behind which somebody reads codes."""
        return {
            step
            for node in self._read(self.chains)
            for step in self.way(node)
            if step.args and self.grid(step) in self.chains and self._takes_codes(step)
        }

    def _norm_may_follow(self, chain: Taken) -> bool:
        """Whether a chain may compute the BatchNorm of the layer that it starts from."""
        norm = chain.layer.kwargs.get("norm") if chain.layer is not None else None
        if not isinstance(norm, fx.Node):
            return False
        return may_stand_in(self.model.get_submodule(str(norm.target))) and str(norm.target) not in self.distrusted

    def _takes_codes(self, node: fx.Node) -> bool:
        """Whether an operation that carries a grid through can do so with codes."""
        module = submodule_of(self.model, node)
        if module is not None and not self.stands_in(node):
            return False
        if module is not None:
            return isinstance(module, (*DROPOUTS, *RESHAPING_MODULES)) or window(node, module) is not None
        return reshapes(node) is not None or window(node, None) is not None

    def _is_worth_it(self, quantizer: fx.Node, chain: Taken, chains: dict[fx.Node, Taken]) -> bool:
        """Whether a quantizer takes a norm or a sum over, or is read as codes; else it is one pass as it is."""
        if chain.operands is not None or self._norm_may_follow(chain):
            return True
        return any(self.grid(node) is quantizer for node in self._read(chains))

    def _read(self, chains: dict[fx.Node, Taken]) -> list[fx.Node]:
        """Nodes that somebody reads as codes."""
        read = [reader.args[0] for reader in self.readers]
        read += [operand for product in self.matmuls for operand in product.args]
        read += [operand for chain in chains.values() for operand in chain.operands or ()]
        return [node for node in read if isinstance(node, fx.Node)]
