"""Decides what of a prepared graph trains on codes; `rewriting` does it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import fx

from qat.codes.operators.grid import codes_refusal, mode_refusal
from qat.codes.operators.product import layer_refusal
from qat.codes.training.activations import Activation, activation_of
from qat.codes.training.watched import module_refusal
from qat.graph.in_place import Memory
from qat.graph.nodes import constant_nodes, submodule_of
from qat.graph.operations import DROPOUTS, JOINING
from qat.integers.movement import RESHAPING, reshapes, window
from qat.layers import QuantLayer
from qat.preparation.operations import grid_of, is_product, operation_of, passes_grid
from qat.preparation.replacements import may_write
from qat.quantizer import Quantizer


@dataclass(frozen=True)
class FusedGroup:
    """The nodes before a quantizer that a kernel computes together with it."""

    source: fx.Node  # whose value the kernel reads
    activation: Activation | None = None
    layer: fx.Node | None = None  # the source, if the kernel computes its BatchNorm
    operands: tuple[fx.Node, fx.Node] | None = None  # of the source, if that is a sum


class CodesPlan:
    """The nodes of a graph that train on codes, and the reasons of those that do not."""

    def __init__(self, model: fx.GraphModule, distrusted: Collection[str] = ()) -> None:
        self.model, self.distrusted = model, distrusted
        self.nodes: list[fx.Node] = list(model.graph.nodes)
        self.memory = Memory(model, model.graph)
        self.fixed = constant_nodes(model.graph, layers=True)
        self.refused: dict[fx.Node, str] = {}  # quantizers, layers and products of activations, and why
        called = {node: submodule_of(model, node) for node in self.nodes}
        quantizers = [node for node in self.nodes if isinstance(called[node], Quantizer)]
        self.quantizers = self._accepted(quantizers, self._quantizer_refusal)  # whose output can be held as codes
        self.layers = self._accepted(
            (node for node in self.nodes if isinstance(called[node], QuantLayer)), self._layer_refusal
        )
        self.matmuls = self._accepted((node for node in self.nodes if is_product(node, model)), self._matmul_refusal)
        chains = {node: self._chain(node) for node in self.nodes if node in self.quantizers}
        worthless = [node for node, chain in chains.items() if not self._is_worth_it(node, chain, chains)]
        self.refused |= dict.fromkeys(worthless, "nothing that computes on codes reads it")
        # Quantizers that are computed with the nodes before them, and these nodes.
        self.chains = {node: chain for node, chain in chains.items() if node not in self.refused}
        # Max pools, reshapings and dropouts whose result is read as codes.
        moves = {step for node in self._read(self.chains) for step in self.path_to_quantizer(node) if step.args}
        self.moved = {step for step in moves if self.grid(step) in self.chains and self._takes_codes(step)}
        taken = self.chains.values()
        # Nodes that are computed as part of a chain, and layers whose BatchNorm is.
        self.absorbed = {node for chain in taken if chain.activation is not None for node in chain.activation.nodes}
        self.absorbed |= {chain.source for chain in taken if chain.operands is not None}
        self.fused_norms = {chain.layer for chain in self.chains.values() if self._norm_may_follow(chain)}

    def grid(self, node: object) -> fx.Node | None:
        """Return the quantizer in `quantizers` on whose grid a tensor lies, or None."""
        source = grid_of(node, self.model) if isinstance(node, fx.Node) else None
        return source if self._grid_refusal(node, source) is None else None

    def _grid_refusal(self, node: object, source: fx.Node | None) -> str | None:
        if source is None or not isinstance(node, fx.Node):
            return "its operand comes from no quantizer"
        if source not in self.quantizers:
            return f"its operand comes from {source.target}: {self.refused[source]}"
        for step in self.path_to_quantizer(node):
            if step.target in DROPOUTS.functions:
                return f"F.dropout stands between it and {source.target}"
            reason = self._call_refusal(step.target) if step.op == "call_module" else None
            if reason is not None:
                return f"{step.target} stands between it and {source.target}: {reason}"
        return None

    def path_to_quantizer(self, node: fx.Node) -> list[fx.Node]:
        """Return the operations that keep the grid, from a tensor back to its quantizer."""
        path = []
        while passes_grid(node, self.model):
            path.append(node)
            (node, *_) = node.all_input_nodes
        return path

    def _call_refusal(self, name: object) -> str | None:
        if str(name) in self.distrusted:
            return "its self-check found a difference"
        return module_refusal(self.model.get_submodule(str(name)))

    def _accepted(self, nodes: Iterable[fx.Node], refusal: Callable[[fx.Node], str | None]) -> set[fx.Node]:
        reasons = {node: refusal(node) for node in nodes}
        self.refused |= {node: reason for node, reason in reasons.items() if reason is not None}
        return {node for node, reason in reasons.items() if reason is None}

    def _quantizer_refusal(self, node: fx.Node) -> str | None:
        quantizer = submodule_of(self.model, node)
        assert isinstance(quantizer, Quantizer)
        if node in self.fixed:
            return "it quantizes what is the same in every step"
        reason = codes_refusal(quantizer) or mode_refusal(quantizer) or self._call_refusal(node.target)
        if reason is not None:
            return reason
        if self.memory.writers(node):  # the write would not reach the codes
            return "an operation in place changes its output"
        readers = self.memory.readers(node)
        writing = [each for each in readers if may_write(submodule_of(self.model, each))]
        return f"{writing[0].target}, which reads it, may write into its output" if writing else None

    def _layer_refusal(self, node: fx.Node) -> str | None:
        layer = submodule_of(self.model, node)
        assert isinstance(layer, QuantLayer)
        reason = layer_refusal(layer) or self._call_refusal(node.target)
        if reason is not None:
            return reason
        if not node.args or not {"input_quantizer"} <= set(node.kwargs) <= {"input_quantizer", "norm"}:
            return "its input has no quantizer in the graph"
        handed = node.kwargs["input_quantizer"]
        assert isinstance(handed, fx.Node)
        if layer.input_quantizer not in (None, self.model.get_submodule(str(handed.target))):
            return "it quantizes its input itself"
        return self._operands_refusal(node.args[:1])

    def _matmul_refusal(self, node: fx.Node) -> str | None:
        if [type(each) for each in node.args] != [fx.Node, fx.Node] or node.kwargs:
            return "it is not called with its two operands alone"
        return self._operands_refusal(node.args)

    def _operands_refusal(self, operands: Iterable[object]) -> str | None:
        for operand in operands:
            source = grid_of(operand, self.model) if isinstance(operand, fx.Node) else None
            reason = self._grid_refusal(operand, source)
            if reason is not None:
                return reason
        return None

    def _chain(self, quantizer: fx.Node) -> FusedGroup:
        # Walks back over nodes that no other node reads.
        source = quantizer.args[0]
        assert isinstance(source, fx.Node)
        activation = self._activation(source)
        if activation is not None:
            source = activation.source
            if activation.curve is not None or activation.axis is not None:
                return FusedGroup(source, activation)
        if len(source.users) == 1:
            if source in self.layers:
                return FusedGroup(source, activation, layer=source)
            if operation_of(source, self.model, JOINING) == "add" and not source.kwargs and len(source.args) == 2:
                a, b = source.args
                if self.grid(a) is not None and self.grid(b) is not None:
                    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
                    return FusedGroup(source, activation, operands=(a, b))
        return FusedGroup(source, activation)

    def _activation(self, node: fx.Node) -> Activation | None:
        # It is computed with the quantizer behind it, that is, later than the graph does it.
        found = activation_of(node, self.model)
        if found is None or not self.memory.can_wait(found.source, found.nodes):
            return None
        if found.module is not None and self._call_refusal(found.module) is not None:
            return None
        # The source is kept for the backward; a caller who gets it as an output may write to it before that.
        returned = any(reader.op == "output" for reader in self.memory.readers(found.source))
        return None if returned else found

    def _norm_may_follow(self, chain: FusedGroup) -> bool:
        norm = chain.layer.kwargs.get("norm") if chain.layer is not None else None
        return isinstance(norm, fx.Node) and self._call_refusal(norm.target) is None

    def _takes_codes(self, node: fx.Node) -> bool:
        module = submodule_of(self.model, node)
        if module is None:
            return reshapes(node) is not None or window(node, None) is not None
        moves = isinstance(module, (*DROPOUTS.modules, *RESHAPING.modules)) or window(node, module) is not None
        return moves and self._call_refusal(node.target) is None

    def _is_worth_it(self, quantizer: fx.Node, chain: FusedGroup, chains: dict[fx.Node, FusedGroup]) -> bool:
        # A quantizer alone is one pass anyway: only a norm, a sum or a reader of codes makes codes pay.
        if chain.operands is not None or self._norm_may_follow(chain):
            return True
        return any(self.grid(node) is quantizer for node in self._read(chains))

    def _read(self, chains: dict[fx.Node, FusedGroup]) -> list[fx.Node]:
        read = [reader.args[0] for reader in self.layers]
        read += [operand for product in self.matmuls for operand in product.args]
        read += [operand for chain in chains.values() for operand in chain.operands or ()]
        return [node for node in read if isinstance(node, fx.Node)]
