"""Leaf modules, whose calls are opaque operators while `torch.export` runs.

The operator `qat::leaf` only computes the shapes of a module's results, so layers, norms, dropouts, LSTMs, modules with
hooks or parametrizations and classes of the user come out of an export as a call of that very module.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.contexts import evaluating
from qat.layers.twins import float_type_of
from qat.quantizer import Quantizer
from qat.torch_internals import (
    CALLED,
    AnyBatchNorm,
    call_by_hand,
    forget_decisions,
    has_forward_hooks,
    pytree,
    version_of,
)

TAKEN_APART = (
    nn.MultiheadAttention, nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)  # fmt: skip

KEPT_WHOLE = ("StochasticDepth", "FrozenBatchNorm2d", "SyncBatchNorm", "CUDASyncBatchNorm")
"""Modules that stay whole: torchvision's first draws by row, and the BatchNorms fold as modules."""

library: Any = torch.library.Library("qat", "FRAGMENT")  # type: ignore[no-untyped-call]
library.define("leaf(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
LEAF = torch.ops.qat.leaf.default
fx.node.has_side_effect(LEAF)  # an export would drop calls whose results nothing reads

Function = Callable[..., object]

TENSOR = object()
"""Stand-in for a tensor among the results of a call."""

calls: list["LeafCall"] = []
"""Calls of the present export; the operator gets their index. One thread at a time exports."""

running: list["LeafCall"] = []
"""The call whose shapes are being computed, if any."""


class LeafCall:
    """A call of a leaf: its arguments, those it writes, the packing of its results."""

    def __init__(
        self, target: str | Function, run: Function, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        self.target, self.run = target, run  # the name of a module, or a function
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        kinds = (Tensor, torch.SymInt)
        self.places = [[i for i, leaf in enumerate(leaves) if isinstance(leaf, kind)] for kind in kinds]
        self.given = [[leaves[i] for i in places] for places in self.places]
        self.constants = leaves
        self.note: dict[str, str] = {}  # for the meta of its node
        self.written: list[int] = []
        self.in_place = False
        self.results: list[object] = []
        self.packing: Any = None

    def arguments(self, *given: Sequence[object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return its args and kwargs, with these tensors and sizes in their places."""
        leaves = [*self.constants]
        for places, values in zip(self.places, given, strict=True):
            for place, value in zip(places, values, strict=True):
                leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def __call__(self) -> object:
        """Call the operator, and pack what it returns as the leaf packs its results."""
        number = len(calls)
        calls.append(self)
        found = iter(LEAF(number, *self.given))
        return pytree.tree_unflatten([next(found) if one is TENSOR else one for one in self.results], self.packing)


@torch.library.register_fake("qat::leaf", lib=library)  # type: ignore[untyped-decorator]
def _shapes(number: int, tensors: list[Tensor], sizes: list[int]) -> list[Tensor]:
    call = calls[number]
    args, kwargs = call.arguments(tensors, sizes)
    versions = [version_of(tensor) for tensor in tensors]
    running.append(call)
    try:
        with forget_decisions(tensors):  # the leaf decides anew whenever it runs
            results, call.packing = pytree.tree_flatten(call.run(*args, **kwargs))
    finally:
        running.pop()
    # Not every operator of torch counts a version here: `in_place` is for layers that declare it.
    call.written = [i for i, x in enumerate(tensors) if version_of(x) != versions[i] or (i == 0 and call.in_place)]
    call.results = [TENSOR if isinstance(result, Tensor) else result for result in results]
    return [
        torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=one.device)
        for one in results
        if isinstance(one, Tensor)
    ]


def named(layer: str, function: Function, *args: object) -> Any:
    """Call a function as a leaf whose node notes the layer that would replace it."""
    call = LeafCall(function, function, args, {})
    call.note = {LAYER_NAME: layer}
    return call()


LAYER_NAME = "qat_layer_name"
"""Key of node.meta: name, within its module, of the layer that replaces a function."""


def is_leaf(module: nn.Module) -> bool:
    """Return True if a call stays one node: torch's modules, and those with a twin."""
    if type(module) in TAKEN_APART or isinstance(module, nn.Sequential) or type(module).forward is nn.Module.forward:
        return False
    known = type(module).__name__ in KEPT_WHOLE or isinstance(module, Quantizer) or float_type_of(module) is not None
    return known or type(module).__module__.startswith(("torch.nn", "torch.ao.nn")) or _rests_in_evaluation(module)


def _rests_in_evaluation(module: nn.Module) -> bool:
    # A module without state that passes its input on in evaluation and changes it in training, such as DropPath. Taken
    # apart, it would give all that follows other inputs in training, and so a second copy in the graph.
    if any(True for _ in (*module.children(), *module.parameters(), *module.buffers())):
        return False
    x = torch.ones(2, 2)
    try:
        with evaluating(module):
            return module(x) is x and module.train()(x) is not x
    except Exception:  # it takes other inputs
        return False


@contextmanager
def opaque_leaves(model: nn.Module, attention: Callable[..., object]) -> Iterator[None]:
    """Make leaves opaque; attention modules run `attention(module, named)`.

    The model is a copy that is thrown away.
    """
    calls.clear()
    inside = ""
    for name, module in model.named_modules():
        if not name or (inside and name.startswith(inside)):
            continue  # of a leaf nothing inside is called by the graph
        if is_leaf(module):
            inside = f"{name}."
            # torch.export hands out stand-ins of modules that share their attributes: so it is an attribute.
            vars(module)[CALLED] = partial(_call, name, module)
        elif type(module) is nn.MultiheadAttention:
            vars(module)["forward"] = partial(attention, module, named)
    try:
        yield
    finally:
        calls.clear()


def _call(name: str, module: nn.Module, *args: object, **kwargs: object) -> object:
    run: Function = call_by_hand(module)
    if isinstance(module, nn.RNNBase) and isinstance(args[0] if args else kwargs.get("input"), Tensor):
        run = partial(_recurrent, module)
    elif isinstance(module, AnyBatchNorm) and not has_forward_hooks(module):
        run = _as_large  # torch's decomposition asks sympy much about the layout of its result
    call = LeafCall(name, run, args, kwargs)
    call.in_place = bool(getattr(module, "inplace", False))
    return call()


def _as_large(input: Tensor) -> Tensor:
    return input


def _recurrent(module: nn.RNNBase, input: Tensor, hx: object = None) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    # Empty results: torch's code goes over the sequence step by step, which would fix its length in the graph.
    size, directions = module.proj_size or module.hidden_size, 1 + module.bidirectional
    samples = input.shape[0 if module.batch_first else 1 : 1 if module.batch_first else 2] if input.dim() == 3 else ()
    states = [
        input.new_empty(directions * module.num_layers, *samples, width)
        for width in (size, module.hidden_size)[: 1 + (module.mode == "LSTM")]
    ]
    y = input.new_empty(*input.shape[:-1], directions * size)
    return y, tuple(states) if len(states) > 1 else states[0]
