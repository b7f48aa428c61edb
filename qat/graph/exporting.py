"""One mode of a model as `torch.export` records it, with as many free sizes as it allows."""

import copy
import inspect
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from qat.contexts import warnings_ignored
from qat.graph.attention import multi_head_attention, scaled_dot_product_attention
from qat.graph.caches import empty_caches
from qat.graph.leaves import LeafCall, calls, opaque_leaves, running
from qat.graph.lifting import Lifter, packed, unpacked
from qat.graph.patches import mode_is_asked, torch_as_captured
from qat.graph.side_effects import CaptureError
from qat.graph.sizes import first_broken
from qat.inputs import Examples, call_given, copied
from qat.text import first_line
from qat.torch_internals import depends_on_values, free_sizes, size_conditions

BATCH = 7
"""The batch size that export sees: rarely the size of something else, and not 1, which export takes for fixed."""

PATIENCE = 40.0
"""Seconds of its thread, however busy the machine is, for an attempt with all sizes free; sympy takes minutes for
models of windows."""

GRADIENTS = frozenset((
    "requires_grad", "requires_grad_", "is_leaf", "grad", "grad_fn", "backward", "retain_grad", "retains_grad",
    "register_hook", "register_post_accumulate_grad_hook",
))  # fmt: skip
"""Attributes and methods of a tensor that concern its gradients. A graph keeps none of them."""

OUTSIDE = frozenset(("numpy", "__array__", "__dlpack__"))
"""Methods that take a tensor's values out of torch."""


ATTENTION = F.scaled_dot_product_attention

BY_VALUES = "the way through it depends on the values of a tensor ({}); torch.where(condition, a, b) takes both ways"


@dataclass(frozen=True)
class Captured:
    """A graph of one mode, its free sizes ("all", those of the "batch", "none"), whether code asks for the mode."""

    graph: fx.Graph
    free: str
    asks_mode: bool


class OutOfPatienceError(Exception):
    """An attempt takes longer than it may."""


class Outer(nn.Module):
    """A model as a function from a list of tensors to a tuple of tensors; `results` says how its own were packed."""

    def __init__(self, model: nn.Module, packing: dict[str, Any], results: list[Any]) -> None:
        super().__init__()
        self.model, self.packing, self.results = model, packing, results  # export puts back what forward assigns

    def forward(self, leaves: list[Tensor]) -> tuple[Any, ...]:
        """The tensors in the model's result."""
        made = unpacked(self.packing, leaves.__getitem__, lambda kind, args, kwargs: kind(*args, **kwargs))
        slots: list[Any] = []
        self.results.append(packed(call_given(self.model, made), slots))
        return tuple(slots)


class Watching(TorchFunctionMode):
    """A context that takes attention apart, refuses questions about gradients, and stops when time is up."""

    def __init__(self, until: float) -> None:
        super().__init__()
        self.until, self.calls = until, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        self.calls += 1
        if self.calls % 64 == 0 and time.thread_time() > self.until:  # it takes longer than a call
            raise OutOfPatienceError
        if asked := _lost(function):
            raise CaptureError(
                f"forward asks a tensor for {asked} ({place_of(_frames())}), which a graph does not keep"
            )
        if function is Tensor.contiguous:  # the method records no call if a tensor without values has that layout
            function = torch.ops.aten.contiguous.default
        if function is ATTENTION:
            return scaled_dot_product_attention(*args, **(kwargs or {}))
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            if depends_on_values(error):  # here, since torch.export prints its whole graph for it
                raise CaptureError(BY_VALUES.format(place_of(_frames()))) from error
            if function is Tensor.view and not isinstance(args[1], torch.dtype):
                return args[0].reshape(*args[1:])  # torch's own layers may lay out tensors without values otherwise
            raise


def is_paused() -> bool:
    """Whether a leaf runs, for the shapes of its results."""
    return bool(running)


def _lost(function: Any) -> str | None:
    """What code outside of torch asks of a tensor's gradients or values, if a function is that."""
    name = (
        getattr(getattr(function, "__self__", None), "__name__", "")
        if function.__name__ == "__get__"
        else function.__name__
    )
    if name not in GRADIENTS | OUTSIDE or running:
        return None
    inside = (__name__, "")  # the modes of the export itself stand between
    frames = (frame for frame, _ in _frames() if frame.f_code.co_name != "__torch_function__")
    caller = next(module for frame in frames if (module := str(frame.f_globals.get("__name__", ""))) not in inside)
    return None if caller.startswith("torch.") else name


def _frames() -> Iterator[tuple[Any, int]]:
    """The frames that run, innermost first, with their lines."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def place_of(frames: Iterable[tuple[Any, int]]) -> str:
    """File and line of the first frame outside of torch and this package."""
    inside = ("torch.", "qat.")
    frame, line = next(each for each in frames if not f"{each[0].f_globals.get('__name__')}.".startswith(inside))
    return f"{Path(frame.f_code.co_filename).name}, line {line}"


def attempts(examples: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Which sizes are free, and the inputs to export with; the first that works is the best."""
    sizes = {x.shape[0] if x.dim() else 0 for x in examples if isinstance(x, Tensor)}
    if len(sizes) == 1 and 0 not in sizes and all(isinstance(x, Tensor) for x in examples):
        grown = resized(examples, BATCH)
        yield "all", grown
        yield "batch", grown
    yield "all", examples
    yield "batch", examples
    yield "none", examples


def resized(examples: list[Any], count: int) -> list[Any]:
    """Tensors with so many samples, of those that there are."""
    return [x[torch.arange(count, device=x.device) % len(x)] for x in examples]


def export(model: nn.Module, examples: Examples, allowed: tuple[str, ...]) -> Captured:
    """The graph of a model in its present mode, with as many free sizes as possible of those that are `allowed`.

    Raises:
        CaptureError: if it cannot be captured; the message is that of the attempt that fixed least.
    """
    leaves: list[Any] = []
    packing = {name: packed(value, leaves) for name, value in examples.items()}
    first: Exception | None = None
    kind = type(model).__name__
    for free, given in attempts(leaves):
        if free not in allowed:
            continue
        try:
            return _attempt(model, examples, packing, leaves, given, free)
        except OutOfPatienceError:
            continue
        except Exception as error:
            if depends_on_values(error):
                place = place_of(reversed(list(traceback.walk_tb(error.__traceback__))))
                raise CaptureError(f"{kind} cannot be captured: {BY_VALUES.format(place)}") from error
            if isinstance(error, CaptureError):
                raise CaptureError(f"{kind} cannot be captured: {error}") from error
            first = first or error
    assert first is not None
    if "fake tensor" in str(first).lower():  # torch's word for what stands in for a tensor
        raise CaptureError(f"{kind} cannot be captured: forward makes a tensor in a way that is not recorded")
    raise CaptureError(f"torch.export cannot capture {kind}: {first_line(first)}") from first


def _attempt(
    model: nn.Module, examples: Examples, packing: Any, leaves: list[Any], given: list[Any], free: str
) -> Captured:
    shared = {id(parameter): parameter for parameter in model.parameters()}
    results: list[Any] = []
    outer = Outer(copy.deepcopy(model, shared), packing, results)
    outer.training = model.training
    if given is not leaves:
        empty_caches(outer.model, lambda count: outer(resized(leaves, count)))
    until = time.thread_time() + PATIENCE if free == "all" else float("inf")
    opaque = opaque_leaves(outer.model, multi_head_attention)
    captured = torch_as_captured(is_paused)
    with captured, opaque, mode_is_asked(is_paused) as asked, Watching(until), warnings_ignored():
        exported = exported_program(outer, copied(given), free)
        recorded: list[LeafCall] = [*calls]
    ranks = [f"len(s[{number}]) == {x.dim()}" for number, x in enumerate(leaves) if isinstance(x, Tensor)]
    # Forward may ask for the rank, and no guard tells.
    conditions = [*ranks, *size_conditions(exported, len(given), __file__)]
    if broken := first_broken(conditions, leaves):  # a loop over the samples takes as many as there were
        raise RuntimeError(f"it takes for granted that {broken}")
    graph = Lifter(model, exported, recorded, "model.").lift(examples, packing, conditions, results[-1])
    return Captured(graph, free, bool(asked))


def exported_program(outer: nn.Module, leaves: list[Any], free: str) -> ExportedProgram:
    """The export of a model of a list of tensors."""
    axes = {"all": None, "batch": 1, "none": 0}[free]
    dynamic = [dict.fromkeys([*range(x.dim())][:axes], Dim.AUTO) for x in leaves]
    with torch.enable_grad(), free_sizes():
        return torch.export.export(outer, (leaves,), dynamic_shapes=(dynamic,), strict=False)
