"""`Evaluator`: evaluates a model as an integer program while it is unchanged.

It runs without gradients, on the CPU where the C kernels are built, or on a GPU with Triton. A program answers only
after it has computed the model's own integers for the first inputs that it sees: each quantizer's from the same
integers before it.
"""

import copy
import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TypeAlias, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from qat.analysis.state import not_finite
from qat.codes.evaluation.modules import Quantize
from qat.codes.evaluation.program import QUANTIZER, integer_program, merged
from qat.codes.operators.grid import shift_of
from qat.codes.training.watched import LAYERS, is_changed, kind_of
from qat.codes.verdict import is_wanted
from qat.graph.guards import Snapshot
from qat.graph.randomness import rewinding
from qat.integers.evaluation import evaluation_copy, quantizer_calls
from qat.integers.following import Follower
from qat.integers.frozen import NotANumberError, stored_offset
from qat.integers.movement import rests
from qat.kernels import passes_values, plain_formulas
from qat.kernels.cpu.addresses import places_of
from qat.kernels.cpu.processor import asked_for
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.replacements import is_watched, module_names, scalar_attributes
from qat.quantizer import Quantizer
from qat.text import first_line
from qat.torch_internals import buffers_of, children_of, hooks_of, parameters_of, pytree, versions_of

log = logging.getLogger("qat")

_T = TypeVar("_T")
Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]

TOLERANCE = 1e-4
"""Largest error of float outputs, as a share of the largest; sums differ in order."""


def state_of(model: nn.Module) -> Snapshot:
    """Return what an evaluation depends on: modules, their attributes, hooks and tensors."""
    modules = list(model.modules())
    names = [{key for key, _ in scalar_attributes(m)} | {"training", "observer", "spec"} for m in modules]
    children = [children_of(module).values() for module in modules]
    held = [held.values() for m in modules for held in (parameters_of(m), buffers_of(m))]
    kept = list(chain.from_iterable(held))  # so that no other tensor gets their memory
    plain = [x for x in kept if x is not None and type(x) in (Tensor, nn.Parameter)]
    lines = [line_of(x) for x in plain if x.is_cpu and x.is_floating_point()]

    def tensors() -> tuple[object, ...]:
        present = [x for x in chain.from_iterable(held) if x is not None]
        return versions_of(present), places_of(present), len(kept)

    def sample() -> bytes:
        # Averages by hand (EMA) write through `.data`, of which no version tells.
        return torch.cat(lines).view(torch.uint8).numpy().tobytes() if lines else b""

    reads = [partial(itemgetter(*sorted(own & vars(m).keys())), vars(m)) for m, own in zip(modules, names, strict=True)]
    reads += [partial(len, vars(m)) for m in modules]  # a patched method is one more
    reads += [partial(any, [hooks for module in modules for hooks in hooks_of(module)])]
    return Snapshot([*reads, lambda: [*chain.from_iterable(children)], tensors, sample, asked_for])


def line_of(x: Tensor) -> Tensor:
    """Return a view of up to 16 elements along the longest axis of a tensor, through its middle."""
    longest = max(range(x.dim()), key=x.shape.__getitem__, default=None)
    if longest is None or not x.numel():
        return x.detach().reshape(-1)
    middle = (slice(None, None, -(-size // 16)) if axis == longest else size // 2 for axis, size in enumerate(x.shape))
    return x.detach()[tuple(middle)]


class Evaluator:
    """The integer program of a model in one state.

    `program` is None where the model evaluates as it is, for a `reason`. The reason is "" where qat itself looks inside
    or a module is in training mode: callers know that. `agreed` says for each program, by its code, if it computes what
    the model does. The caller counts `failures` in a row.
    """

    def __init__(self, model: PreparedGraph, agreed: dict[str, bool], reason: str | None = None) -> None:
        self.state, self.program, self.failures = state_of(model), None, 0
        self._agreed = agreed
        with torch.inference_mode(False), torch.no_grad():  # the program outlives the caller's inference mode
            self.reason = _refusal(model) if reason is None else reason
            if self.reason is not None:
                return
            try:
                evaluated = cast("fx.GraphModule", evaluation_copy(model))
                program = integer_program(evaluated)
                called = {name for names in quantizer_calls(evaluated).values() for name in names}
                # Quantizers outside of codes run inside a layer, or on a grid that bytes cannot hold.
                if program is None or not called <= {node.meta.get(QUANTIZER) for node in program.graph.nodes}:
                    self.reason = "no layer, or not every quantizer, has integers of one byte outside of layers"
                    return
                device = next(model.parameters()).device
                program, self._seen = on_device(program, device)
                self._key, self.program = f"{device.type}{program.code}{evaluated.code}", merged(program)
            except Exception as error:  # whatever it does not take runs operation by operation
                self.reason = first_line(error)
                return
            self._proof = None if self._key in agreed else (program, evaluated)

    def is_proven(self, args: Args, kwargs: Kwargs) -> bool:
        """Return True if the program computes what the model does, as first inputs show."""
        assert self.program is not None
        if self._proof is not None:
            program, evaluated = self._proof
            cause = "computed something else"
            with torch.inference_mode(False), torch.no_grad(), rewinding():
                try:
                    same = not is_wanted() or agrees(
                        program, self.program, evaluated, *_sample(evaluated, args, kwargs)
                    )
                except NotANumberError:
                    raise
                except Exception as error:
                    with plain_formulas():
                        evaluated(*_on_cpu(args), **_on_cpu(kwargs))  # which raises too if it is for the inputs
                    same, cause = False, f"fails ({first_line(error)})"
            self._agreed[self._key], self._proof = same, None
            if not same:
                self.reason = f"its integer program {cause}"
                log.warning("evaluation runs operation by operation: %s", self.reason)
        if not self._agreed[self._key]:
            self.program = None
        return self.program is not None

    def __call__(self, args: Args, kwargs: Kwargs) -> object:
        """Return the model's result; raise NotANumberError if a value is NaN.

        On a GPU the host does not wait for that, and the whole result is NaN.
        """
        assert self.program is not None
        if self._seen is not None:
            self._seen.zero_()  # of an earlier call's NaN
        result, self.failures = self.program(*args, **kwargs), 0
        if (seen := self._seen) is not None:
            result = pytree.tree_map(
                lambda x: x + seen if isinstance(x, Tensor) and x.is_floating_point() else x, result
            )
        given = [*args, *kwargs.values()]
        if any(isinstance(x, Tensor) and x.dim() == 4 and not x.is_contiguous() for x in given):
            return result
        # The program computes with channels innermost; callers of contiguous images expect contiguous results.
        return pytree.tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, result)


def supports_inputs(given: Iterable[Tensor], device: torch.device) -> bool:
    """Return True if programs take these inputs, besides what training asks of them."""
    # A CUDA graph would keep the integers that it was recorded with.
    if torch.is_grad_enabled() or (any(x.is_cuda for x in given) and torch.cuda.is_current_stream_capturing()):
        return False
    return all(type(x) is Tensor and x.device == device and (x.is_cpu or passes_values(x)) and x.numel() for x in given)


def on_device(program: fx.GraphModule, device: torch.device) -> tuple[fx.GraphModule, Tensor | None]:
    """Return a program for a device, and on a GPU the tensor that notes a NaN."""
    seen = torch.zeros((), device=device)
    if not passes_values(seen):
        return program, None
    program = copy.deepcopy(program).to(device)  # it shares modules with what it was made of
    for module in program.modules():
        if isinstance(module, Quantize):
            module.seen = seen
    return program, seen


def _on_cpu(values: _T) -> _T:
    return cast("_T", pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, values))


def agrees(program: fx.GraphModule, fast: nn.Module, evaluated: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Return True if a program computes a model's integers and results.

    Each quantizer's integers are computed from the same integers before it. `fast`, the `merged` program, has to be
    equal.
    """
    recorder = Recorder(program)
    with rewinding():  # so that each of the three draws the same random numbers, if any
        theirs = recorder.run_with(args, kwargs)
    calls = quantizer_calls(evaluated)
    integers: dict[str, Tensor] = {}
    for path, names in calls.items():
        quantizer = cast("Quantizer", evaluated.get_submodule(path))
        offset = stored_offset(quantizer) - shift_of(quantizer)
        integers |= {name: recorder.codes[name].cpu().float() + offset for name in names if name in recorder.codes}
    follower = Follower(calls, integers, "the program")
    with plain_formulas(), follower.following(evaluated), rewinding():
        ours = evaluated(*_on_cpu(args), **_on_cpu(kwargs))
    if any(each.beyond_ties for each in follower.differences):
        return False
    same = zip(pytree.tree_leaves(theirs), pytree.tree_leaves(fast(*args, **kwargs)), strict=True)
    if not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in same):
        return False
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(_on_cpu(theirs)), strict=True)
    return all(_is_close(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _sample(evaluated: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    lengths = {len(x) if x.dim() else 0 for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    if len(lengths) == 1 and lengths.pop() > 1:
        first = pytree.tree_map(lambda x: x[:1] if isinstance(x, Tensor) else x, (args, kwargs))
        with suppress(Exception), plain_formulas():  # of the user's own code
            evaluated(*_on_cpu(first[0]), **_on_cpu(first[1]))
            return cast("tuple[Args, Kwargs]", first)
    return args, kwargs


class Recorder(fx.Interpreter):
    """An interpreter of a program that keeps the codes of every quantizer."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.nodes = program.graph.nodes
        self.codes: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        """Return the node's value, and keep it if it is a quantizer's."""
        value = super().run_node(n)
        if QUANTIZER in n.meta:
            self.codes[n.meta[QUANTIZER]] = value
        return value

    def run_with(self, args: Args, kwargs: Kwargs) -> object:
        """Return the program's result for these arguments."""
        names = {str(node.target): node for node in self.nodes if node.op == "placeholder"}
        given = dict(zip(names, args, strict=False)) | kwargs
        return self.run(*[given[name] if name in given else node.args[0] for name, node in names.items()])


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    largest = ours.abs().max().item() if ours.numel() else 0.0
    return torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE * largest, equal_nan=True)


def _has_hooks_of_qat(module: nn.Module) -> bool:
    hooks = [getattr(hook, "func", hook) for held in hooks_of(module) for hook in held.values()]
    return any(str(hook.__module__).startswith("qat.") for hook in hooks)


def _refusal(model: PreparedGraph) -> str | None:
    if broken := not_finite(model):  # integers would lose it
        return broken
    tensors = [*model.parameters(), *model.buffers()]
    if any(x.is_inference() or (x.is_floating_point() and x.dtype != torch.float32) for x in tensors):
        return "a tensor of it is not float32, or was made in inference mode"
    if len({x.device for x in tensors}) > 1:
        return "its tensors lie on several devices"
    for name in module_names(model):
        module, kind = model.get_submodule(name), kind_of(model.get_submodule(name))
        if module.training or _has_hooks_of_qat(module):
            return ""
        if is_watched(module) or (isinstance(module, LAYERS) and is_changed(kind)):
            return f"{name!r} has a hook, or a method of it was replaced"
        if not (rests(module) or kind.__module__.startswith(("torch.nn.modules.", "qat."))):
            return f"{name!r} is a {kind.__name__}, a class of your own"
    return None
