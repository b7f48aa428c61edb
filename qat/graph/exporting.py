"""One mode of a model, recorded by `torch.export` with the most free sizes."""

import copy
import inspect
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from qat.contexts import warnings_ignored
from qat.graph.attention import multi_head_attention, scaled_dot_product_attention
from qat.graph.guards import first_broken
from qat.graph.leaves import LeafCall, calls, opaque_leaves, running
from qat.graph.lifting import FIXED, Lifter, Packing, packed, unpacked
from qat.graph.patches import mode_is_asked, torch_as_captured
from qat.graph.side_effects import CaptureError, restoring_state, state_of
from qat.inputs import Examples, call_given, copied
from qat.text import first_line
from qat.torch_internals import depends_on_values, free_sizes, pytree, size_conditions

BATCH = 7
"""Batch size that export sees: rarely the size of something else, and not 1, which export takes for fixed."""

PATIENCE = 40.0
"""Seconds of thread time for an attempt with all sizes free; sympy takes minutes for models of windows."""

GRADIENTS = frozenset((
    "requires_grad", "requires_grad_", "is_leaf", "grad", "grad_fn", "backward", "retain_grad", "retains_grad",
    "register_hook", "register_post_accumulate_grad_hook",
))  # fmt: skip
"""Attributes and methods of a tensor that concern its gradients. A graph keeps none of them."""

OUTSIDE = frozenset(("numpy", "__array__", "__dlpack__"))
"""Methods that take a tensor's values out of torch."""

LAYOUT = (Tensor.is_contiguous, Tensor.stride)
"""Methods that tell how a tensor lies in memory, which a graph keeps as it was."""

ATTENTION = F.scaled_dot_product_attention

BY_VALUES = "the way through it depends on the values of a tensor ({}); torch.where(condition, a, b) takes both ways"


@dataclass(frozen=True)
class Captured:
    """A graph of one mode, and facts about its export."""

    graph: fx.Graph
    free: str  # the free sizes: "all", those of the "batch", or "none"
    asks_mode: frozenset[str]  # paths of modules that read their `training`
    asks_layout: bool  # forward asks a tensor how it lies in memory


class OutOfPatienceError(Exception):
    """Raised if an attempt takes longer than it may."""


class Outer(nn.Module):
    """A model as a function from a list of tensors to a tuple of tensors."""

    def __init__(self, model: nn.Module, packing: dict[str, Packing], results: list[Packing]) -> None:
        super().__init__()
        # Each call appends the packing of its results: attributes that forward assigns are restored by the export.
        self.model, self.packing, self.results = model, packing, results

    def forward(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors in the model's result."""
        made = unpacked(self.packing, leaves.__getitem__, lambda kind, args, kwargs: kind(*args, **kwargs))
        slots: list[Tensor] = []
        self.results.append(packed(call_given(self.model, made), slots))
        plain = unpacked(self.results[-1], lambda _: None, lambda _, args, kwargs: [*args, *kwargs.values()])
        if others := [each for each in pytree.tree_leaves(plain) if not isinstance(each, FIXED)]:
            raise CaptureError(
                f"forward returns a {type(others[0]).__name__}, which a graph does not keep; return its tensors"
                " (transformers: use_cache=False)"
            )
        return tuple(slots)


class Watching(TorchFunctionMode):
    """Takes attention apart, refuses questions about gradients, and stops in time."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until, self.calls, self.asks_layout = until, 0, False

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        self.calls += 1
        if self.calls % 64 == 0 and time.thread_time() > self.until:  # reading the clock takes longer than a call
            raise OutOfPatienceError
        if function in LAYOUT and _called_from_outside():
            self.asks_layout = True
        if asked := _lost(function):
            raise CaptureError(
                f"forward asks a tensor for {asked} ({place_of(_frames())}), which a graph does not keep"
            )
        if function is Tensor.contiguous:  # the method records no call if a tensor without values has that layout
            function = torch.ops.aten.contiguous.default
        if function is ATTENTION:  # matrix products of their own can get grids
            return scaled_dot_product_attention(*args, **(kwargs or {}))
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            if depends_on_values(error):  # torch.export would print its whole graph for it
                raise CaptureError(BY_VALUES.format(place_of(_frames()))) from error
            if function is Tensor.view and not isinstance(args[1], torch.dtype):
                return args[0].reshape(*args[1:])  # torch's own layers may lay out tensors without values otherwise
            raise


def is_paused() -> bool:
    """Return True while a leaf runs for the shapes of its results."""
    return bool(running)


def _lost(function: Callable[..., object]) -> str | None:
    # The name of the gradient or value that code outside of torch asks a tensor for, if the function is that.
    name = function.__name__
    if name == "__get__":  # of an attribute
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name if name in GRADIENTS | OUTSIDE and _called_from_outside() else None


def _called_from_outside() -> bool:
    # Whether code that is not torch's calls the function that a mode sees, and no leaf does.
    frames = (frame for frame, _ in _frames() if frame.f_code.co_name != "__torch_function__")
    modules = (str(frame.f_globals.get("__name__", "")) for frame in frames)
    caller = next(module for module in modules if module not in (__name__, ""))  # the modes of the export are between
    return not (running or caller.startswith("torch."))


def _frames() -> Iterator[tuple[FrameType, int]]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return file and line of the first frame outside of torch and this package."""
    inside = ("torch.", "qat.")
    frame, line = next(each for each in frames if not f"{each[0].f_globals.get('__name__')}.".startswith(inside))
    return f"{Path(frame.f_code.co_filename).name}, line {line}"


def attempts(examples: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield free sizes and inputs to export with; the first that works is the best."""
    sizes = {x.shape[0] if x.dim() else 0 for x in examples}
    if len(sizes) == 1 and 0 not in sizes:
        grown = resized(examples, BATCH)
        yield "all", grown
        yield "batch", grown
    yield "all", examples
    yield "batch", examples
    yield "none", examples


def resized(examples: list[Tensor], count: int) -> list[Tensor]:
    """Return tensors with `count` samples, which repeat those that there are."""
    return [x[torch.arange(count, device=x.device) % len(x)] for x in examples]


def export(model: nn.Module, examples: Examples, allowed: tuple[str, ...]) -> Captured:
    """Return a model's graph in its present mode, with the most free sizes `allowed`.

    Raises:
        CaptureError: if it cannot be captured; the message is that of the attempt that fixed least.
    """
    leaves: list[Tensor] = []
    packing = {name: packed(value, leaves) for name, value in examples.items()}
    first: Exception | None = None
    kind = type(model).__name__
    for free, given in attempts(leaves):
        if free not in allowed:
            continue
        try:
            return _attempt(model, examples, packing, leaves, given, free)
        except OutOfPatienceError:
            continue  # with fewer free sizes it is faster
        except Exception as error:
            if depends_on_values(error):
                place = place_of(reversed(list(traceback.walk_tb(error.__traceback__))))
                raise CaptureError(f"{kind} cannot be captured: {BY_VALUES.format(place)}") from error
            if isinstance(error, CaptureError):
                raise CaptureError(f"{kind} cannot be captured: {error}") from error
            first = first or error  # of the attempt that fixed least
    assert first is not None
    if "fake tensor" in str(first).lower():  # what torch.export calls its stand-ins for tensors
        raise CaptureError(f"{kind} cannot be captured: forward makes a tensor in a way that is not recorded")
    raise CaptureError(f"torch.export cannot capture {kind}: {first_line(first)}") from first


def _attempt(
    model: nn.Module, examples: Examples, packing: dict[str, Packing], leaves: list[Tensor], given: list[Tensor],
    free: str,
) -> Captured:  # fmt: skip
    shared = {id(parameter): parameter for parameter in model.parameters()}
    results: list[Packing] = []
    outer = Outer(copy.deepcopy(model, shared), packing, results)  # its buffers and attributes are copies
    outer.training = model.training
    if given is not leaves:
        empty_caches(outer.model, lambda count: outer(resized(leaves, count)))
    axes = {"all": None, "batch": 1, "none": 0}[free]
    dynamic = [dict.fromkeys([*range(x.dim())][:axes], Dim.AUTO) for x in given]
    until = time.thread_time() + PATIENCE if free == "all" else float("inf")
    opaque = opaque_leaves(outer.model, multi_head_attention)
    captured = torch_as_captured(is_paused)
    with captured, opaque, mode_is_asked(is_paused) as asked, Watching(until) as watching, warnings_ignored():
        with torch.enable_grad(), free_sizes():
            exported = torch.export.export(outer, (copied(given),), dynamic_shapes=(dynamic,), strict=False)
        recorded: list[LeafCall] = [*calls]
    # Forward may ask for the rank, of which no guard of the export tells.
    ranks = [f"len(s[{number}]) == {x.dim()}" for number, x in enumerate(leaves)]
    conditions = [*ranks, *size_conditions(exported, len(given), __file__)]
    if broken := first_broken(conditions, leaves):  # a loop over the samples takes as many as there were
        raise RuntimeError(f"it takes for granted that {broken}")
    graph = Lifter(model, exported, recorded, "model.").lift(examples, packing, conditions, results[-1])
    paths = {id(module): name for name, module in outer.model.named_modules()}
    asking = frozenset(paths[id(module)] for module in asked if id(module) in paths)
    return Captured(graph, free, asking, watching.asks_layout)


def empty_caches(model: nn.Module, run: Callable[[int], object]) -> None:
    """Empty attributes in which forward keeps sizes: an export would fix these.

    Args:
        model: a copy that is thrown away.
        run: calls it with so many samples.
    """
    with restoring_state(model), torch.no_grad():
        run(2)
        before = _sizes(model)
        run(3)
        after = _sizes(model)
    for name in [name for name, value in before.items() if after.get(name) != value]:
        owner, _, key = name.rpartition(".")
        held = vars(model.get_submodule(owner))
        held[key] = {set: {}, int: -1}.get(type(before[name]), ())  # what no size equals


def _sizes(model: nn.Module) -> dict[str, object]:
    # The attributes that can hold sizes: integers, tuples of integers, and dictionaries by their keys.
    state: dict[str, Any] = state_of(model)
    return {
        name: set(value) if type(value) is dict else value
        for name, value in state.items()
        if type(value) in (int, dict) or (type(value) in (tuple, torch.Size) and all(type(x) is int for x in value))
    }
