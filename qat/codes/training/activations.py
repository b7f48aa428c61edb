"""The activations that kernels compute together with the quantizer behind them."""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.graph.nodes import submodule_of
from qat.kernels.cpu.quantizers import NO_CLIP


@dataclass(frozen=True)
class FusedActivation:
    """A row of the table: a clip, which has bounds, or a curve."""

    modules: tuple[type[nn.Module], ...]
    functions: tuple[Callable[..., Tensor], ...] = ()  # of one tensor
    methods: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    module_bounds: tuple[str, ...] = ()  # attributes of the modules that hold other bounds
    curve: str | None = None  # the kernels' name
    options: Mapping[str, object] = field(default_factory=dict)  # what other arguments have to be

    @property
    def read(self) -> tuple[str, ...]:
        """Attributes of the modules that a fused graph is derived from."""
        own = ("inplace",) if "inplace" in inspect.signature(self.modules[0]).parameters else ()
        return (*own, *self.module_bounds, *self.options)


ACTIVATIONS = (
    FusedActivation((nn.ReLU,), (F.relu, torch.relu, F.relu_), ("relu", "relu_"), bounds=(0.0, math.inf)),
    FusedActivation((nn.ReLU6,), (F.relu6,), bounds=(0.0, 6.0), module_bounds=("min_val", "max_val")),
    FusedActivation((nn.Hardtanh,), bounds=(-1.0, 1.0), module_bounds=("min_val", "max_val")),
    FusedActivation((nn.SiLU,), (F.silu,), curve="silu"),
    FusedActivation((nn.Hardswish,), (F.hardswish,), curve="hardswish"),
    FusedActivation((nn.GELU,), (F.gelu,), curve="gelu", options={"approximate": "none"}),
    FusedActivation((nn.GELU,), (F.gelu,), curve="gelu_tanh", options={"approximate": "tanh"}),
)

DEFAULTS = {"approximate": "none"}
"""Values that torch's functions take for options that are not given."""

READ: dict[type[nn.Module], tuple[str, ...]] = {kind: row.read for row in ACTIVATIONS for kind in row.modules}
"""Attributes that a fused graph is derived from, by class."""

PLAIN_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    row.curve: functools.partial(row.functions[0], **row.options) for row in ACTIVATIONS if row.curve is not None
}
"""torch's functions by the kernels' names of the curves."""


def row_of(computes: object, options: Mapping[str, object]) -> FusedActivation | None:
    """Return the row of a class, function or method with these options, or None."""
    for row in ACTIVATIONS:
        if computes in (*row.modules, *row.functions, *row.methods):
            given = {**DEFAULTS, **options}
            if all(given[name] == value for name, value in row.options.items()):
                return row
    return None


@dataclass(frozen=True)
class Activation:
    """An activation in a graph: a clip, a curve or a softmax."""

    nodes: tuple[fx.Node, ...]  # the last one first: the activation itself, and the multiplication before a softmax
    source: fx.Node  # whose value the activation is computed from
    bounds: tuple[float, float] = NO_CLIP  # floor and ceiling of a clip
    curve: str | None = None  # the kernels' name
    axis: int | None = None  # of a softmax
    multiplier: float = 1.0  # on a softmax's scores

    @property
    def module(self) -> str | None:
        """The name of the layer that computes it; None for a function."""
        node = self.nodes[0]
        return str(node.target) if node.op == "call_module" else None


def activation_of(node: fx.Node, model: fx.GraphModule) -> Activation | None:
    """Return the activation that a node computes for one reader, if kernels know it."""
    # Another reader would need the activation itself, which is never written to memory.
    if len(node.users) != 1 or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, module = node.args[0], submodule_of(model, node)
    row = _row(node, module)
    if row is not None and row.curve is not None:
        return Activation((node,), source, curve=row.curve)
    if row is not None and row.bounds is not None:
        own = () if module is None else tuple(float(getattr(module, name)) for name in row.module_bounds)
        floor, ceiling = own or row.bounds
        return Activation((node,), source, (floor, ceiling))
    axis = _softmax_axis(node, module)
    if axis is None:
        return None
    multiplier = _multiplier(source)
    if multiplier is None:
        return Activation((node,), source, axis=axis)
    (scores,) = source.all_input_nodes
    return Activation((node, source), scores, axis=axis, multiplier=multiplier)


def _row(node: fx.Node, module: nn.Module | None) -> FusedActivation | None:
    # Called with its tensor alone, but for options.
    if len(node.args) != 1 or not set(node.kwargs) <= {"inplace", *DEFAULTS}:
        return None
    if module is not None:  # whatever its name, which is the node's target
        return row_of(type(module), {name: getattr(module, name, value) for name, value in DEFAULTS.items()})
    return row_of(node.target, node.kwargs) if node.op in ("call_function", "call_method") else None


def _softmax_axis(node: fx.Node, module: nn.Module | None) -> int | None:
    if module is not None:
        return module.dim if type(module) is nn.Softmax else None
    if node.target not in (F.softmax, torch.softmax, "softmax") or node.kwargs.get("dtype") is not None:
        return None
    if len(node.args) > 2 or not set(node.kwargs) <= {"dim", "dtype", "_stacklevel"}:
        return None
    axis = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
    return axis if isinstance(axis, int) else None


def _multiplier(node: fx.Node) -> float | None:
    multiplies = node.target in (operator.mul, torch.mul, "mul") and node.op != "call_module"
    if not multiplies or len(node.args) != 2 or node.kwargs or len(node.users) != 1:
        return None
    x, number = node.args
    if not isinstance(x, fx.Node):
        x, number = number, x
    return float(number) if isinstance(x, fx.Node) and isinstance(number, (int, float)) else None
