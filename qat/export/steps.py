"""`integer_program`: a prepared model as steps to write in NumPy, C or HDL."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from qat.export.checks import check_exportable, frozen_for
from qat.export.converted import Array, IntegerArrays, IntegerOperations, arrays_of
from qat.graph.nodes import submodule_of
from qat.graph.operations import AVERAGING, JOINING, PRODUCTS, Calls
from qat.inputs import expect_model
from qat.integers.evaluation import evaluation_copy
from qat.integers.frozen import TRAINED_BITS, FrozenLayer, FrozenParameter, FrozenQuantizer, IntegerGrid
from qat.integers.movement import asks_for_shape
from qat.preparation.operations import is_relu, operation_of, passes_grid
from qat.preparation.refusals import wrapped
from qat.quantizer.ties import Ties
from qat.targets.profile import Operation, TieRule
from qat.torch_internals import pytree

LINEAR: dict[Operation, Calls] = {**JOINING, **AVERAGING, "matmul": PRODUCTS}


@dataclass(frozen=True)
class IntegerStep:
    """A step: result = clamp(round(acc * multiplier * 2**-shift) + zero_point, low, high).

    acc is what the operator makes of q - zero_point of its inputs, exactly: sum((q - zero_point) * weight) + bias of a
    layer, a fraction of an average; operands of a sum or concatenation have a multiplier each. `round` takes ties to
    the even integer in torch, ONNX Runtime and XNNPACK, and away from zero in LiteRT's fixed point; those of averages
    and some sums fall as `ties` says. Without a multiplier integers move (reshape, max pooling), or it is in float.

    Attributes:
        operator: "conv2d", "add", "avg_pool", "requantize", "clip"; or torch's name. "quantize" is clamp(round(x /
            scale) + zero_point, low, high) of a float x; "constant" has its integers in `arrays`.
        inputs: names of the steps that it reads, or of inputs of the model.
        attributes: its options, such as stride, padding and groups.
        arrays: integers of a layer, as of `integer_weights`, where they have the name `layer`.
        grid: of the result; None if that is in float, of a layer acc * arrays.bias_scale.
        low, high: least and greatest integer of the result, also of a ReLU or ReLU6 behind it; values of a float.
        ties: of integers k and k + 1 of an average, or a sum on grids of powers of two, for LiteRT: "up" to k + 1,
            "away" to k + 1 where k >= 0, else to k. None: float32's, of an average on either side.
        multiplier, shift: int64 of 31 bits, and int64; (), or (output channels,), or (operands,).
        in_float: True if there is no integer arithmetic for it: the operator in float, of its inputs' values.
    """

    operator: str
    inputs: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    arrays: IntegerArrays | None = None
    layer: str = ""
    grid: IntegerGrid | None = None
    low: float = -math.inf
    high: float = math.inf
    ties: TieRule | None = None
    multiplier: Array | None = None
    shift: Array | None = None
    in_float: bool = False


@torch.no_grad()
def integer_program(model: nn.Module) -> dict[str, IntegerStep]:
    """Return the steps of evaluation in the graph's order, by the quantizers' names.

    docs/fpga.md runs them in NumPy.

    Args:
        model: a prepared and calibrated model of one graph; it is not changed.

    Raises:
        TypeError: if the model holds no quantizer.
        ValueError: as `convert`, or if the model was prepared without example inputs.

    >>> import qat
    >>> x = torch.rand(8, 3, 8, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval(), example_inputs=x)
    >>> qat.calibrate(model, [x])
    >>> for name, step in qat.integer_program(model).items():
    ...     print(name, step.operator, step.inputs, step.low, step.high)
    input_quantizer quantize ('input',) 0 255
    0_quantizer conv2d ('input_quantizer',) 0 255
    _2 conv2d ('0_quantizer',) -inf inf
    """
    expect_model(integer_program, model)
    inside = wrapped(model)
    model = model if inside is None else inside[1]
    check_exportable(model, "integer_program", TRAINED_BITS)
    frozen = frozen_for("integer_program", evaluation_copy(model), IntegerOperations())
    if not isinstance(frozen, fx.GraphModule):
        raise ValueError("integer_program: the order of its layers is not known; give qat.prepare example_inputs")
    return _Reader(frozen).steps


class _Waiting(NamedTuple):
    # An operation that nobody has read yet. `unit` is the value of 1 in acc, for each operand if it is a list.
    step: IntegerStep
    operands: Sequence[fx.Node] = ()
    unit: Any = None
    ends: Sequence[float] = (-math.inf, math.inf)


class _Reader:
    def __init__(self, frozen: fx.GraphModule) -> None:
        self.frozen, self.steps = frozen, dict[str, IntegerStep]()
        self.names: dict[fx.Node, str] = {}
        self.grids: dict[fx.Node, IntegerGrid] = {}
        self.waiting: dict[fx.Node, _Waiting] = {}
        for node in frozen.graph.nodes:
            module = submodule_of(frozen, node)
            operands = [each for each in _nodes(node.args, node.kwargs) if each in {*self.names, *self.waiting}]
            if node.op == "placeholder":
                self.names[node] = str(node.target)
            elif node.op == "output":
                list(map(self.name, operands))
            elif isinstance(module, FrozenQuantizer):
                self.quantize(node, module, operands[0])
            elif isinstance(module, Ties):
                made = self.waiting[operands[0]]
                self.waiting[node] = made._replace(step=replace(made.step, ties=module.rule))
            elif isinstance(module, FrozenParameter):
                ((_, arrays),) = arrays_of(module)
                numbers = float(module.scale), int(module.zero_point)
                self.grids[node] = IntegerGrid(*numbers, module.low, module.high)
                self.waiting[node] = _Waiting(IntegerStep("constant", arrays=arrays))
            elif not asks_for_shape(node) and (operands or node.op == "get_attr"):  # else a size
                self.waiting[node] = self.operation(node, module, operands)

    def name(self, node: fx.Node) -> str:
        if node not in self.names:
            self.write(node.name, node, self.waiting[node], self.grids.get(node))
        return self.names[node]

    def write(self, name: str, node: fx.Node, made: _Waiting, grid: IntegerGrid | None) -> None:
        inputs, (low, high), multiplier, shift = tuple(map(self.name, made.operands)), made.ends, None, None
        if grid is not None:
            low, high = map(grid.code, made.ends)
            if made.unit is not None:
                real = np.asarray(made.unit, np.float64) / grid.scale
                common = np.abs(real).max() if made.step.arrays is None else real  # operands are added
                shift = np.minimum(31 - np.frexp(common)[1].astype(np.int64), 62)  # beyond it int64 has no product
                multiplier = np.minimum(np.rint(real * 2.0**shift), 2**31 - 1).astype(np.int64)
        in_float = made.step.in_float or (grid is None and made.step.arrays is None)
        while name in self.steps:
            name += "_"
        self.steps[name] = replace(
            made.step, inputs=inputs, grid=grid, low=low, high=high, multiplier=multiplier, shift=shift,
            in_float=in_float,
        )  # fmt: skip
        self.names[node] = name

    def quantize(self, node: fx.Node, quantizer: FrozenQuantizer, source: fx.Node) -> None:
        self.grids[node], old = quantizer.grid(), self.grids.get(source)
        if old == self.grids[node]:
            self.names[node] = self.name(source)
            return
        made = _Waiting(IntegerStep("requantize"), [source], old.scale) if old else self.waiting.get(source)
        made = made or _Waiting(IntegerStep("quantize"), [source])
        self.write(quantizer.quantizer_name, node, made, self.grids[node])

    def operation(self, node: fx.Node, module: nn.Module | None, operands: list[fx.Node]) -> _Waiting:
        kind = operation_of(node, self.frozen, LINEAR)
        layer, called = str(node.target) if module is not None else "", module or node.target
        if isinstance(module, FrozenLayer):
            ((layer, arrays),), called = arrays_of(module), module.twin.float_type
            unit = np.float64(arrays.input_scale) * arrays.scale
            step = IntegerStep(called.__name__.lower(), (), _options(node, module.twin, operands), arrays, layer)
            return _Waiting(step, operands, unit)
        name = kind or getattr(called, "__name__", type(called).__name__ if layer else str(called)).lower()
        step = IntegerStep(name, (), _options(node, module, operands), layer=layer)
        scales = [self.grids[each].scale for each in operands if each in self.grids]
        if is_relu(node, self.frozen) and len(node.all_input_nodes) == 1 and (scales or operands[0] in self.waiting):
            clip = _Waiting(replace(step, operator="clip"), operands, scales)
            made = clip if scales else self.waiting[operands[0]]
            interpreter = fx.Interpreter(self.frozen)
            interpreter.env = {operands[0]: torch.tensor(made.ends)}
            return made._replace(ends=interpreter.run_node(node).tolist())
        if passes_grid(node, self.frozen) and operands[0] in self.grids:
            self.grids[node] = self.grids[operands[0]]
            return _Waiting(step, operands)
        complete = len(scales) == len(operands) and (len(operands) == 2 or kind in {"cat", "stack", *AVERAGING})
        if kind in (None, "div") or not complete or node.kwargs.get("alpha", 1) != 1:
            return _Waiting(replace(step, in_float=True), operands)
        signs = [1, -1] if kind == "sub" else [1] * len(scales)
        one = kind in ("mul", "matmul", *AVERAGING)
        return _Waiting(step, operands, math.prod(scales) if one else np.multiply(scales, signs))


def _nodes(*values: object) -> list[fx.Node]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, fx.Node)]


def _options(node: fx.Node, layer: nn.Module | None, operands: list[fx.Node]) -> dict[str, Any]:
    # Options of a layer, and arguments of a function that are no tensors.
    if layer is not None:
        names = [name for name in getattr(layer, "__constants__", ()) if name in vars(layer)]
        return {**{name: vars(layer)[name] for name in names}, **vars(layer).get("options", {}), **node.kwargs}
    kinds: Any = tuple(Tensor if isinstance(each, fx.Node) else type(each) for each in node.args)
    found = node.normalized_arguments(nn.Module(), kinds, normalize_to_only_use_kwargs=True)
    given = found.kwargs if found else {**{str(place): each for place, each in enumerate(node.args)}, **node.kwargs}
    return {name: fx.node.map_arg(each, str) for name, each in given.items() if not {*_nodes(each)} & {*operands}}
