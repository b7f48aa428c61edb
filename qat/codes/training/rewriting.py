"""Derives the graph that trains on codes from a prepared graph.

It computes the same function with the same modules and parameters. The prepared graph remains the model; the fused one
is derived at the first training step, and again after every change.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import cast

from torch import fx

from qat.codes.operators.add import quantize_sum
from qat.codes.operators.curves import quantize_curve, quantize_softmax
from qat.codes.operators.matmul import matmul
from qat.codes.operators.norm import quantize_chain
from qat.codes.operators.pool import max_pool
from qat.codes.operators.product import multiply
from qat.codes.operators.quantize import decode, drop, encode, reshape, reshape_by, shape_of
from qat.codes.operators.repair import repair
from qat.codes.training.plan import CodesPlan
from qat.codes.training.watched import Watched, module_tree
from qat.codes.verdict import Verdict
from qat.graph.nodes import submodule_of
from qat.graph.operations import DROPOUTS
from qat.integers.movement import asks_for_shape, reshapes, window
from qat.kernels.cpu.quantizers import NO_CLIP
from qat.preparation.replacements import module_names
from qat.torch_internals import keep_signature


@dataclass(frozen=True)
class FusedForward:
    """The forward of a model on codes."""

    graph: fx.Graph | None  # None if nothing can be fused, or if a self-check found another function
    run: Callable[..., object] | None  # the graph as a function of the model, or of its `modules`, and its inputs
    modules: object  # the model's `module_tree`, the faster of the two; torch.compile has to see the model
    watched: Watched
    key: str  # a hash of what it was derived from
    verdict: Verdict | None  # None if there was no self-check


def fused_forward(model: fx.GraphModule, verdicts: Mapping[str, Verdict]) -> FusedForward:
    """Derive the forward on codes of a model whose parts are in the modes of a step."""
    watched = Watched(model, module_names(model))
    kinds = sorted({parameter.device.type for parameter in model.parameters()})
    graph = fused_graph(model)
    code = "" if graph is None else graph.python_code("self").src
    key = hashlib.sha256(repr((watched.text, model.code, code, kinds)).encode()).hexdigest()[:16]
    verdict = verdicts.get(key)  # of a model that was derived alike
    if verdict is not None and verdict.distrusted != ():
        graph = None if verdict.distrusted is None else fused_graph(model, verdict.distrusted)
    run, modules = (None, None) if graph is None else (compiled(graph), module_tree(model, graph))
    return FusedForward(graph, run, modules, watched, key, verdict)


def fused_graph(model: fx.GraphModule, distrusted: Collection[str] = ()) -> fx.Graph | None:
    """Derive a graph on codes without distrusted modules; None if no layer takes any."""
    plan = CodesPlan(model, distrusted)
    return _Rewriting(plan).rewritten() if plan.layers else None


def compiled(graph: fx.Graph) -> Callable[..., object]:
    """Return a graph as a function of a model and its inputs."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, "<fused forward of a prepared model>", "exec"), space)
    return cast("Callable[..., object]", space["forward"])


class _Rewriting:
    # It copies the graph node by node, and replaces nodes as the plan says.

    def __init__(self, plan: CodesPlan) -> None:
        self.plan, self.model = plan, plan.model
        self.graph = fx.Graph()
        self.floats: dict[fx.Node, fx.Node] = {}
        self.codes: dict[fx.Node, fx.Node] = {}
        self.modules: dict[str, fx.Node] = {}

    def rewritten(self) -> fx.Graph:
        begun = False
        for node in self.plan.nodes:
            if not begun and node.op != "placeholder":  # placeholders may come after an input's quantizer
                self._repair()
                begun = True
            if node in self.plan.absorbed:
                continue
            if node in self.plan.layers:
                self.floats[node] = self._product(node)
            elif node in self.plan.matmuls:
                operands = [self._coded(operand) for operand in node.all_input_nodes]
                self.floats[node] = self.graph.call_function(matmul, (operands[0], operands[-1]))
            elif node in self.plan.chains:
                self.codes[node] = self._quantized(node)
            elif node in self.plan.moved:
                self.codes[node] = self._encoded(node, self._move(node))
            else:
                self.floats[node] = self.graph.node_copy(node, self._shape if asks_for_shape(node) else self._float)
        keep_signature(self.model.graph, self.graph)
        self.graph.lint()
        return self.graph

    def _repair(self) -> None:
        # Before anything else reads the scales.
        names = [str(node.target) for node in self.plan.chains]
        names += [f"{node.target}.weight_quantizer" for node in self.plan.layers]
        # A shared quantizer has several names, and is repaired once.
        by_identity = {id(self.model.get_submodule(name)): name for name in sorted(names)}
        self.graph.call_function(repair, tuple(map(self._module, by_identity.values())))

    def _module(self, name: str) -> fx.Node:
        # Each part is looked up once, since lookups are most of a graph's own time.
        if name not in self.modules:
            self.modules[name] = self.graph.get_attr(name)
        return self.modules[name]

    def _float(self, node: fx.Node) -> fx.Node:
        if node not in self.floats:
            self.floats[node] = self.graph.call_function(decode, (self.codes[node],))
        return self.floats[node]

    def _coded(self, node: fx.Node) -> fx.Node:
        if node not in self.codes:
            self.codes[node] = self._encoded(node, self._float(node))
        return self.codes[node]

    def _encoded(self, node: fx.Node, value: fx.Node) -> fx.Node:
        # On codes, unless an active dropout changed the values.
        quantizer = self.plan.grid(node)
        assert quantizer is not None
        grid = self._module(str(quantizer.target))
        path = self.plan.path_to_quantizer(node)
        dropouts = [step for step in path if isinstance(submodule_of(self.model, step), DROPOUTS.modules)]
        checked = [self._module(str(step.target)) for step in dropouts]
        return self.graph.call_function(encode, (value, grid, *checked))

    def _move(self, node: fx.Node) -> fx.Node:
        x, *args = node.args
        assert isinstance(x, fx.Node)
        coded, module = self._coded(x), submodule_of(self.model, node)
        held = None if module is None else self._module(str(node.target))
        pooled = window(node, module)
        if pooled is not None:
            return self.graph.call_function(max_pool, (coded, tuple(pooled), held))
        if isinstance(module, DROPOUTS.modules):
            return self.graph.call_function(drop, (coded, held))
        if module is not None:
            return self.graph.call_function(reshape_by, (coded, held))
        given = fx.node.map_arg((tuple(args), dict(node.kwargs)), self._float)
        return self.graph.call_function(reshape, (coded, reshapes(node), *given[0]), given[1])

    def _shape(self, node: fx.Node) -> fx.Node:
        if node in self.floats:
            return self.floats[node]
        return self.graph.call_function(shape_of, (self.codes[node],))

    def _product(self, node: fx.Node) -> fx.Node:
        x, *operands = node.args
        assert isinstance(x, fx.Node)
        layer, input_quantizer = self._module(str(node.target)), self._handed(node, "input_quantizer")
        others = [self._float(operand) if isinstance(operand, fx.Node) else operand for operand in operands]
        y = self.graph.call_function(multiply, (layer, self._coded(x), input_quantizer, *others))
        norm = node.kwargs.get("norm")
        if isinstance(norm, fx.Node) and node not in self.plan.fused_norms:
            y = self.graph.call_module(str(norm.target), (y,))
        return y

    def _handed(self, call: fx.Node, key: str) -> fx.Node:
        module = call.kwargs[key]
        assert isinstance(module, fx.Node)
        return self.floats[module]

    def _quantized(self, node: fx.Node) -> fx.Node:
        chain, activation = self.plan.chains[node], self.plan.chains[node].activation
        quantizer, module = self._module(str(node.target)), None
        if activation is not None and activation.module is not None:
            module = self._module(activation.module)
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
        norm = None
        if chain.layer is not None and chain.layer in self.plan.fused_norms:
            norm = self._handed(chain.layer, "norm")
        return self.graph.call_function(quantize_chain, (source, quantizer, norm, *bounds, module))
