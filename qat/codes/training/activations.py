"""The activations that kernels compute together with the quantizer behind them."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx, nn

from qat.graph.nodes import is_call, submodule_of
from qat.graph.operations import JOINING, NONLINEAR, TABLE, Row
from qat.kernels.cpu.quantizers import NO_CLIP

PLAIN_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    row.fused: functools.partial(row.functions[0], **row.options) for row in TABLE if row.fused is not None
}
"""torch's functions by the kernels' names of the curves."""

DEFAULTS = {"approximate": "none"}
"""Values that torch's functions take for options that are not given."""


def row_of(computes: object, options: Mapping[str, object]) -> Row | None:
    """Return the row of a class, function or method with these options, or None."""
    for row in TABLE:
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
    if row is not None and row.fused is not None:
        return Activation((node,), source, curve=row.fused)
    if row is not None and row.bounds is not None:
        ends = zip(("min_val", "max_val"), row.bounds, strict=True)
        floor, ceiling = (float(getattr(module, name, bound)) for name, bound in ends)
        return Activation((node,), source, (floor, ceiling))
    axis = _softmax_axis(node, module, model)
    if axis is None:
        return None
    multiplier = _multiplier(source)
    if multiplier is None:
        return Activation((node,), source, axis=axis)
    (scores,) = source.all_input_nodes
    return Activation((node, source), scores, axis=axis, multiplier=multiplier)


def _row(node: fx.Node, module: nn.Module | None) -> Row | None:
    # Called with its tensor alone, but for options.
    if len(node.args) != 1 or not set(node.kwargs) <= {"inplace", *DEFAULTS}:
        return None
    if module is not None:  # whatever its name, which is the node's target
        return row_of(type(module), {name: getattr(module, name, value) for name, value in DEFAULTS.items()})
    return row_of(node.target, node.kwargs) if node.op in ("call_function", "call_method") else None


def _softmax_axis(node: fx.Node, module: nn.Module | None, model: fx.GraphModule) -> int | None:
    if module is not None:
        return module.dim if type(module) is nn.Softmax else None
    softmax = is_call(node, *NONLINEAR["softmax"], model)
    if not softmax or node.kwargs.get("dtype") is not None:
        return None
    if len(node.args) > 2 or not set(node.kwargs) <= {"dim", "dtype", "_stacklevel"}:
        return None
    axis = node.args[1] if len(node.args) == 2 else node.kwargs.get("dim")
    return axis if isinstance(axis, int) else None


def _multiplier(node: fx.Node) -> float | None:
    if (
        node.target not in (*JOINING["mul"].functions, "mul")
        or len(node.args) != 2
        or node.kwargs
        or len(node.users) != 1
    ):
        return None
    x, number = node.args
    if not isinstance(x, fx.Node):
        x, number = number, x
    return float(number) if isinstance(x, fx.Node) and isinstance(number, (int, float)) else None
