"""`fixed_program`: a model's graph on uint8 codes in fixed point, with nothing in float between its ends."""

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.integers.fixed_point import FixedAverage, FixedJoin, FixedProduct, FixedQuantize, Onto, moving_table, rounded
from qat.integers.frozen import FreezingError
from qat.integers.grids import all_values
from qat.integers.modules import Dequantize, Quantize, Table
from qat.integers.movement import asks_for_shape
from qat.integers.products import Product
from qat.integers.program import Chain, Writer
from qat.kernels.cpu.quantizers import NO_CLIP
from qat.kernels.integers import Numbers
from qat.preparation.operations import AVERAGING, JOINING, NONLINEAR, averages_pixels, operation_of, passes_grid
from qat.tracing.nodes import submodule_of
from qat.tracing.proxies import expect_default

TABLES = ("sigmoid", "tanh")
"""Functions whose exact values, rounded, are those of TensorFlow Lite Micro's kernels."""

ZERO_MARGINS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
"""What may come before the first quantizer, as before LiteRT's QUANTIZE."""

WIDEST_STEP = 1.25
"""Of their operand: its kernels let coarser ones saturate early."""


def fixed_program(model: nn.Module) -> fx.GraphModule:
    """The program of a model that `evaluation_copy` made.

    Raises:
        FreezingError: for what fixed point is not defined for, by name.
    """
    if not isinstance(model, fx.GraphModule):
        raise FreezingError("fixed point takes a model whose whole graph qat.prepare recorded")
    program = FixedWriter(model).program()
    inside: dict[fx.Node, bool] = {}  # floats: whether they were computed, or come from outside
    for node in program.graph.nodes:
        module, read = submodule_of(program, node), [inside[each] for each in node.all_input_nodes if each in inside]
        if node.target is expect_default:
            continue
        if node.op == "placeholder" or isinstance(module, Dequantize) or type(module) is Product:
            inside[node] = node.op != "placeholder"
        elif read and (asks_for_shape(node) or passes_grid(node, program) or isinstance(module, ZERO_MARGINS)):
            inside[node] = any(read)
        elif (read and not (node.op == "output" or isinstance(module, Quantize))) or (
            isinstance(module, FixedQuantize) and any(read)
        ):
            raise _refusal(node, program)
    return program


class FixedWriter(Writer):
    """Every quantizer becomes one step in fixed point, with the operation before it."""

    product = FixedProduct

    def _as_given(self, averaged: Any, node: fx.Node) -> fx.Node:
        return self._float(node)  # averages are integers here

    def _chain(self, quantizer: fx.Node) -> Chain:
        chain = super()._chain(quantizer)
        if chain.kind != "floats":
            return chain
        before, clip = self._clip(chain.start)
        waits = len(before.users) == 1 and all(self._grid(each) is not None for each in before.all_input_nodes)
        if waits and self._kind(before) and self.memory.can_wait(before.all_input_nodes[0], (before,)):
            return Chain("operation", before, (chain.start, before), clip)
        return chain

    def _joins_codes(self, node: fx.Node) -> bool:
        return False  # it is an operation here, with its clip

    def _kind(self, node: fx.Node) -> str | None:
        """The operation that a node calls, if fixed point joins or averages codes so."""
        kind = operation_of(node, self.model, JOINING) or operation_of(node, self.model, AVERAGING)
        if kind in ("add", "sub", "mul"):
            two = len(node.args) == 2 and all(isinstance(each, fx.Node) for each in node.args) and not node.kwargs
            return kind if two else None
        return kind if kind == "cat" or (kind == "avg_pool" and self._pool(node) is not None) else None

    def _pool(self, node: fx.Node) -> Any:
        """An average pool of images as a module; None if margins do not count, or windows differ."""
        made: dict[Any, Any] = {F.avg_pool2d: nn.AvgPool2d, F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d}
        pool: Any = nn.AdaptiveAvgPool2d(1) if averages_pixels(node) else submodule_of(self.model, node)
        if node.target in made and len(node.all_input_nodes) == 1:
            pool = made[node.target](*node.args[1:], **node.kwargs)
        if type(pool) is nn.AvgPool2d:
            counts = pool.count_include_pad or pool.padding in (0, (0, 0), [0, 0])
            return None if pool.ceil_mode or pool.divisor_override or not counts else pool
        return pool if type(pool) is nn.AdaptiveAvgPool2d else None

    def _quantized(self, node: fx.Node) -> fx.Node:
        chain, to = self.chains[node], self.grids[node]
        if chain.kind == "table":
            return self._call(Table(self._table(chain, to)), self._coded(chain.start))
        if chain.kind == "floats":
            return self._call(FixedQuantize(to, self.names[node]), self._float(chain.start))
        if chain.kind == "layer":
            return super()._quantized(node)
        return self._operation(chain, to)

    def _table(self, chain: Chain, to: Numbers) -> Tensor:
        """The codes of a function for each of the 256 codes that it reads: bounds, or one of `TABLES` and bounds."""
        source, (first, *others) = self._numbers(chain.start), chain.steps or (None,)
        clips = [self._clip(step) for step in chain.steps]
        if first is None or clips[0][0] is not first:
            return moving_table(source, to, [clip for _, clip in clips])
        if operation_of(first, self.model, NONLINEAR) not in TABLES or source.grid.step > WIDEST_STEP:
            raise _refusal(first, self.model)
        values = self._run(first, all_values(source).double())
        for step in others:
            values = self._run(step, values)
        return Onto(to)(rounded(values / to.grid.step).long())

    def _numbers(self, node: fx.Node) -> Numbers:
        return self.grids[cast("fx.Node", self._grid(node))]

    def _operation(self, chain: Chain, to: Numbers) -> fx.Node:
        """A sum, difference, product, concatenation or average."""
        node, kind, operands = chain.start, self._kind(chain.start), chain.start.all_input_nodes
        if kind == "cat":
            tables = {each: Table(moving_table(self._numbers(each), to)) for each in operands}
            moved = {each: self._call(table, self._coded(each)) for each, table in tables.items()}
            joined = self.graph.node_copy(node, lambda each: moved[each])
            return joined if chain.clip == NO_CLIP else self._call(Table(moving_table(to, to, [chain.clip])), joined)
        read: Any = operands if kind == "avg_pool" else node.args  # which may name one operand twice
        sources, codes = [self._numbers(each) for each in read], [self._coded(each) for each in read]
        if kind != "avg_pool":
            return self._call(FixedJoin(str(kind), sources, to, chain.clip), *codes)
        average = self._call(FixedAverage(self._pool(node), sources[0], to, chain.clip), codes[0])
        drops = averages_pixels(node) and not (node.kwargs.get("keepdim") or node.args[2:] == (True,))
        return self.graph.call_method("flatten", (average, 1)) if drops else average


def _refusal(node: fx.Node, model: fx.GraphModule) -> FreezingError:
    module = submodule_of(model, node)
    what = str(getattr(node.target, "__name__", node.target)) if module is None else type(module).__name__
    return FreezingError(f"fixed point is not defined for {what} ({node.name!r}) here")
