"""`integer_work`: which share of a prepared model's multiply-accumulates runs on integers, and where the rest runs."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from qat.contexts import evaluating
from qat.graph.nodes import scope_of
from qat.graph.patches import without_fast_path
from qat.inputs import Inputs, call_model
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.quantizer.base import without_range_warnings
from qat.torch_internals import (
    BILINEAR_OPERATOR,
    CPU_ATTENTION_OPERATOR,
    CUDNN_RECURRENT_OPERATOR,
    TorchDispatchMode,
    pytree,
    storage_id,
    writes_to_arguments,
)

aten = torch.ops.aten

Shape = Sequence[int]


@dataclass(frozen=True)
class Place:
    """The multiply-accumulates of one layer, or of one matrix product between activations."""

    name: str  # the module, or scope and node of an operation, such as encoder.self_attention.matmul_1
    kind: str  # the type of the layer, or the operator
    macs: int
    integer: bool  # whether both operands are integers on a grid


@dataclass(frozen=True)
class Work:
    """The multiply-accumulates of a model, in the order in which they ran."""

    places: tuple[Place, ...]

    @property
    def total(self) -> int:
        """All multiply-accumulates."""
        return sum(place.macs for place in self.places)

    @property
    def share(self) -> float:
        """The share that runs on integers, 0 to 1; 1 for a model without any."""
        done = sum(place.macs for place in self.places if place.integer)
        return done / self.total if self.total else 1.0

    @property
    def in_float(self) -> tuple[Place, ...]:
        """The places that compute in float."""
        return tuple(place for place in self.places if not place.integer)


def integer_work(model: nn.Module, example_inputs: Inputs) -> Work:
    """Count the multiply-accumulates of one forward pass, and which of them have two integer operands.

    A quantized layer works on integers if it quantizes its input itself, or is given the quantizer of an input that
    lies on its grid, and if both rules have integers. A product of activations does if both factors lie on grids. A
    tensor lies on a grid if it comes from a quantizer through operations that only move values; this is followed tensor
    by tensor as the model runs. Look-ups (embeddings) and elementwise operations do not count.

    Source: the formulas of torch.utils.flop_counter, halved; `FORMULAS` adds those that it lacks.
    """
    meter = _Meter()
    with (
        without_range_warnings(model),
        evaluating(model),
        torch.no_grad(),
        without_fast_path(),  # the fused operators hide the layers inside
        _watched(model, meter),
        meter,
    ):
        call_model(model, example_inputs)
    return Work(tuple(Place(*key[:2], macs, key[2]) for key, macs in meter.macs.items()))


@dataclass
class _Frame:
    """What is running: its name and type, and whether it is integer work; None: its operands decide."""

    name: str
    kind: str
    integer: bool | None = None


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator: counts its work for what is running, and follows which tensors lie on a quantizer's grid."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[_Frame] = []
        self.macs: dict[tuple[str, str, bool], int] = {}
        self.on_grid: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = func.overloadpacket
        result = func(*args, **kwargs)
        macs = macs_of(operator, args, kwargs, result)
        if macs:
            self._add(operator, args, macs)
        mutates = writes_to_arguments(func)
        self._follow(args, kwargs, result, not mutates and moves_values(operator, args, kwargs), mutates)
        return result

    def mark(self, tensor: Tensor) -> None:
        """Note that a quantizer made this tensor."""
        self.on_grid.add(storage_id(tensor))

    def is_marked(self, tensor: Tensor) -> bool:
        """Whether a quantizer made the values of this tensor."""
        return storage_id(tensor) in self.on_grid

    def _add(self, operator: Any, args: tuple[Any, ...], macs: int) -> None:
        frame = self.running[-1]
        integer = frame.integer
        if integer is None:
            factors = [args[position] for position in FACTORS.get(operator, ())]
            integer = bool(factors) and all(map(self.is_marked, factors))
        key = (frame.name, frame.kind, integer)
        self.macs[key] = self.macs.get(key, 0) + macs

    def _follow(self, args: Any, kwargs: Any, result: Any, moves: bool, mutates: bool) -> None:
        given = {storage_id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        carried = moves and self.is_marked(args[0])
        for tensor in pytree.tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            memory = storage_id(tensor)
            if memory not in given and carried:
                self.on_grid.add(memory)
            elif memory not in given or mutates:
                # New memory may reuse that of a freed tensor on a grid, and written memory no longer holds grid values.
                # A view needs nothing: it shares its base's mark.
                self.on_grid.discard(memory)


@contextmanager
def _watched(model: nn.Module, meter: _Meter) -> Iterator[None]:
    """A context in which every module tells the meter when it runs, and graphs run node by node."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            entering = module.register_forward_pre_hook(_entering(name, meter), with_kwargs=True, prepend=True)
            stack.enter_context(entering)
            stack.enter_context(module.register_forward_hook(_leaving(meter), always_call=True))
            if isinstance(module, fx.GraphModule):
                stack.enter_context(_replaced(module, "forward", _node_by_node(module, name, meter)))
            elif isinstance(module, QuantLayer):
                stack.enter_context(_replaced(module, "operate", _operating(module, name, meter)))
        yield


@contextmanager
def _replaced(module: nn.Module, method: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module has another method."""
    before = module.__dict__.get(method)
    setattr(module, method, function)
    try:
        yield
    finally:
        delattr(module, method)
        if before is not None:
            setattr(module, method, before)


def _entering(name: str, meter: _Meter) -> Callable[..., None]:
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        integer = None
        if isinstance(module, QuantLayer):
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            integer = _runs_on_integers(module, given, meter)
        meter.running.append(_Frame(name, type(module).__name__, integer))

    return enter


def _leaving(meter: _Meter) -> Callable[..., None]:
    def leave(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        meter.running.pop()
        if isinstance(module, Quantizer) and module.has_integers and isinstance(result, Tensor):
            meter.mark(result)

    return leave


def _operating(layer: QuantLayer, name: str, meter: _Meter) -> Callable[..., Tensor]:
    """The layer's operation; recurrent layers call it without forward, at every time step."""
    operate = layer.operate

    def operating(*args: Any, **kwargs: Any) -> Tensor:
        if meter.running[-1].name == name:
            return operate(*args, **kwargs)
        meter.running.append(_Frame(name, type(layer).__name__, _runs_on_integers(layer, {}, meter)))
        try:
            return operate(*args, **kwargs)
        finally:
            meter.running.pop()

    return operating


def _runs_on_integers(layer: QuantLayer, given: Mapping[str, Any], meter: _Meter) -> bool | None:
    """Whether a layer, called with these arguments, has integer operands; None if it has no weight of its own."""
    if not isinstance(getattr(layer, "weight_quantizer", None), Quantizer):
        return None
    grids = [module for module in layer.children() if isinstance(module, Quantizer) and module.role == "activation"]
    if layer.has_input_grid and not grids:
        grids = [given["input_quantizer"]] if given.get("input_quantizer") is not None else []
        if not all(meter.is_marked(x) for x in list(given.values())[:1]):
            return False  # a quantizer was given, but the input lies on no grid
    return len(grids) == layer.has_input_grid and all(grid.has_integers for grid in (*grids, layer.weight_quantizer))


def _node_by_node(module: fx.GraphModule, path: str, meter: _Meter) -> Callable[..., Any]:
    """A forward that runs the graph node by node, so that the meter knows the names of its functions."""
    signature = inspect.signature(type(module).forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        return _NamingInterpreter(module, path, meter).run(*list(bound.arguments.values())[1:])

    return forward


class _NamingInterpreter(fx.Interpreter):
    """Runs a graph, and names each function and method to the meter while it runs."""

    def __init__(self, module: fx.GraphModule, path: str, meter: _Meter) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors read as the model's own
        self.path = path
        self.meter = meter

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        name = ".".join(part for part in (self.path, scope_of(n), n.name) if part)
        kind = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
        self.meter.running.append(_Frame(name, kind))
        try:
            return super().run_node(n)
        finally:
            self.meter.running.pop()


FACTORS: dict[Any, tuple[int, int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.convolution), (0, 1)),
    **dict.fromkeys((aten.addmm, aten.addmv, aten.baddbmm), (1, 2)),
}
"""Operator to the positions of its two factors. Other operators are not single products and count as float work."""

_MOVING = (
    "clone", "roll", "flip", "repeat", "index", "index_select", "gather", "im2col", "unfold_copy",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle",
    "max_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
)  # fmt: skip
MOVING = frozenset(getattr(aten, name) for name in _MOVING)
"""Operators that copy values of their first argument into new memory; views share memory and are not listed."""


def moves_values(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether every value of the result is one of the first argument's, or 0 or -inf, which no grid minds."""
    if operator is aten.constant_pad_nd:
        return bool((args[2] if len(args) > 2 else kwargs.get("value", 0)) in (0, -math.inf))
    return operator in MOVING


def macs_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Multiply-accumulates of one call: by the formulas here, or half of torch's floating-point operations."""
    own = FORMULAS.get(operator)
    if own is not None:
        return own(*pytree.tree_map_only(Tensor, lambda tensor: tensor.shape, tuple(args)))
    if operator is _deformable_convolution():
        return int(result.numel() * args[1][0].numel())  # the interpolation is not counted
    known = flop_registry.get(operator)
    return 0 if known is None else int(known(*args, **kwargs, out_val=result)) // 2


def _deformable_convolution() -> Any:
    """torchvision's operator; None unless torchvision was imported."""
    return getattr(torch.ops.torchvision, "deform_conv2d", None)


def _bilinear(first: Shape, weight: Shape, *_: Any) -> int:
    """x1 (rows, in1), weight (out, in1, in2): every row of x1 is multiplied by the whole weight."""
    rows: int = math.prod(first) // weight[-2]
    return rows * math.prod(weight)


def _mkldnn_recurrent(x: Shape, input_weight: Shape, hidden_weight: Shape, *_: Any) -> int:
    """One layer and direction."""
    return math.prod(x[:-1]) * (math.prod(input_weight) + math.prod(hidden_weight))


def _recurrent(x: Shape, weights: Sequence[Shape], *_: Any) -> int:
    """All layers and directions: every step of every sample is multiplied by every matrix."""
    return math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _attention(query: Shape, key: Shape, value: Shape, *_: Any) -> int:
    """query (..., L, E), key (..., S, E), value (..., S, V): L x S x E for the scores, L x S x V for the result."""
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mv: lambda matrix, vector: math.prod(matrix),
    aten.addmv: lambda bias, matrix, vector: math.prod(matrix),
    BILINEAR_OPERATOR: _bilinear,
    aten.mkldnn_rnn_layer: _mkldnn_recurrent,
    CUDNN_RECURRENT_OPERATOR: _recurrent,
    CPU_ATTENTION_OPERATOR: _attention,
}
"""Operator to its multiply-accumulates, from the shapes of its arguments, where flop_counter counts 0."""
