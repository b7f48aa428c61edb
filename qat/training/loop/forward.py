"""Faster ways through a model: over many ranks, compiled, or in CUDA graphs.

A CUDA graph is one launch for the thousands of short kernels of a quantized model. It keeps what it was recorded with:
the shape of its batch, the memory of parameters and buffers, and every switch of the model that Python code reads. It
follows values written into the same memory, such as the temperature of a rule.
"""

import inspect
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qat.collectives import largest, rank_count
from qat.graph.guards import Snapshot
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.proof import check_parts
from qat.preparation.replacements import is_watched, scalar_attributes
from qat.text import first_line
from qat.training.errors import UserError
from qat.training.loop.stage import StageRun
from qat.training.run.exit_status import is_memory_shortage

logger = logging.getLogger("qat")

Forward: TypeAlias = Callable[[Tensor], object]
LossOf: TypeAlias = Callable[[Forward], Tensor]  # the loss of a fixed batch through the given forward
Layout: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]


def check_graphs(device: torch.device, cuda_graphs: str | bool) -> None:
    if cuda_graphs is True and device.type != "cuda":
        raise UserError(f"cuda_graphs: true needs a CUDA device; on device {device.type!r} leave it out")


def autocast(device: torch.device, amp: str) -> AbstractContextManager[object]:
    """Return a context of mixed precision on a device: `none`, `bf16` or `fp16`."""
    if amp == "none":
        return nullcontext()
    if amp == "fp16" and device.type != "cuda":
        raise UserError(f"amp: 'fp16' needs a CUDA device; on device {device.type!r} use 'bf16' or 'none'")
    # A graph cannot be recorded with the cache, which would only help float weights that are read twice.
    return torch.autocast(
        device.type, dtype=torch.bfloat16 if amp == "bf16" else torch.float16, cache_enabled=device.type != "cuda"
    )


class Step(NamedTuple):
    """Result of a trial step."""

    loss: float
    norm: float  # of all gradients
    learning: frozenset[str]  # names of the parameters that have a gradient


def trial_step(model: nn.Module, forward: Forward, loss_of: LossOf) -> Step:
    """Run a forward and a backward through `forward`, and restore the model's state."""
    named = dict(model.named_parameters())
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    gradients = [(each, each.grad) for each in named.values()]
    devices = {each.device.index or 0 for each in named.values() if each.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            for parameter in named.values():
                parameter.grad = None
            loss = loss_of(forward)
            loss.backward()  # type: ignore[no-untyped-call]
            found = {name: each.grad.detach() for name, each in named.items() if each.grad is not None}
            norm = math.hypot(*(float(torch.linalg.vector_norm(each.float())) for each in found.values()))
            return Step(float(loss.detach()), norm, frozenset(found))
        finally:
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)
            for parameter, gradient in gradients:
                parameter.grad = gradient


_NAMES = ("forward_sync_buffers", "broadcast_buffers")  # torch 2.11 has the second one
SYNC_BUFFERS = next(name for name in _NAMES if name in inspect.signature(DistributedDataParallel).parameters)
ONE_BUCKET = 2**20  # megabytes, more than any model's gradients have


def averaged(model: nn.Module, loss_of: LossOf) -> nn.Module:
    """Wrap the model to average gradients over the ranks; on one rank, return it."""
    if rank_count() == 1:
        return model
    learning = {name for name, each in model.named_parameters() if each.requires_grad}
    [unused] = largest(bool(learning - trial_step(model, model, loss_of).learning))
    # Each rank has its own BatchNorm statistics in training; evaluations and checkpoints have rank 0's.
    more: dict[str, Any] = {SYNC_BUFFERS: False, "find_unused_parameters": bool(unused)}
    if next(model.parameters()).device.type == "cpu":
        more["bucket_cap_mb"] = ONE_BUCKET  # sums during the backward would take its processor away
    ddp = DistributedDataParallel(model, **more)
    # After its first backward, it sorts gradients into other buckets, in which sums round otherwise. In a first and in
    # a resumed run, which must add alike, that backward is this trial's.
    trial_step(model, ddp, loss_of)
    return ddp


LARGEST_GAP = 1e-2  # between evaluation in a graph and without, relative to the largest value: algorithms differ


def switches(model: nn.Module) -> Snapshot:
    """Return what a graph takes for granted: modes, numbers, flags, and what learns."""
    reads = [partial(scalar_attributes, module) for module in model.modules()]
    reads += [partial(getattr, module, "training") for module in model.modules()]
    return Snapshot([*reads, lambda: [each.requires_grad for each in model.parameters()]])


class TrainingGraphs:
    """A model in training, recorded at the first call, for batches of one shape."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout: Layout | None = None
        self.recorded: nn.Module | None = None

    def __call__(self, images: Tensor) -> object:
        if self.recorded is None:
            # In a module of its own: torch replaces the forward of the module that it records.
            self.recorded, self.layout = nn.Sequential(self.model), _layout(images)
            # It records on its own stream; torch would warn of every other stream that adds to gradients.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
            torch.cuda.make_graphed_callables(self.recorded, (images.clone(),), allow_unused_input=True)
        return (self.recorded if _layout(images) == self.layout else self.model)(images)


class EvaluationGraph:
    """A model under no_grad, recorded at the first batch at which no hook looks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout: Layout | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.images, self.result = Tensor(), Tensor()  # their memory is the graph's: each call overwrites it

    def __call__(self, images: Tensor) -> object:
        if self.layout is None and not is_watched(self.model):
            expected = self.model(images)
            engines = (each._fused_engine() for each in self.model.modules() if isinstance(each, PreparedGraph))
            if any(engine is not None and engine.evaluates_on_codes for engine in engines):
                return expected  # few kernels already, and the next epoch has other integers
            self.layout = _layout(images)
            try:
                self.images, graph = images.clone(), torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    self.result = self.model(self.images)
                graph.replay()
                if not isinstance(expected, Tensor):
                    what = type(expected).__name__
                    raise TypeError(f"the model returns a {what}, and a graph is compared by one tensor")
                off = (self.result - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
                if not bool(off <= LARGEST_GAP):
                    raise ValueError(
                        f"in a graph the model answers otherwise, by {float(off):.2g} of the largest value"
                    )
                self.graph = graph
            except Exception as error:
                if is_memory_shortage(error):
                    raise
                logger.warning("cuda_graphs: %s; evaluation runs operation by operation, slower", first_line(error))
        if self.graph is None or _layout(images) != self.layout:
            return self.model(images)
        self.images.copy_(images)
        self.graph.replay()
        return self.result


def _layout(images: Tensor) -> Layout:
    return images.shape, images.stride(), images.dtype


# Large, since compiled code draws other random numbers.
LOSS_TOLERANCE = 0.25  # relative difference of the losses
GRADIENT_FACTOR = 4.0  # between the norms of the gradients


def faster_way(run: StageRun, forward: nn.Module, images: Tensor, loss_of: LossOf) -> Forward:
    """Return `forward` compiled or in CUDA graphs, as config and device have it."""
    if run.config.compile:
        check_parts(run.model, {run.model: ((images,), {})})
        return as_tried("compile", torch.compile(forward), run.model, forward, loss_of)
    if run.in_graphs:
        return as_tried("cuda_graphs", TrainingGraphs(forward), run.model, forward, loss_of)
    return forward


def as_tried(setting: str, fast: Forward, model: nn.Module, forward: Forward, loss_of: LossOf) -> Forward:
    """Return `fast`, or `forward` with a warning if a trial step finds a difference."""
    expected = trial_step(model, forward, loss_of)
    try:
        difference = _gross_difference(trial_step(model, fast, loss_of), expected)
    except Exception as error:  # from the compiler or the recording: the model itself has just run
        if is_memory_shortage(error):
            raise
        difference = f"{type(error).__name__}: {first_line(error)}"
    if difference is None:
        return fast
    logger.warning("%s: %s; training goes on without, slower", setting, difference)
    return forward


def _gross_difference(found: Step, expected: Step) -> str | None:
    if found.learning != expected.learning:
        name = min(found.learning ^ expected.learning)
        return f"{name} has {'a' if name in found.learning else 'no'} gradient in the faster model only"
    if not math.isfinite(expected.loss + expected.norm):
        return None
    if not abs(found.loss - expected.loss) <= LOSS_TOLERANCE * (1 + abs(expected.loss)):
        return f"the loss of the faster model is {found.loss:.4g} instead of {expected.loss:.4g}"
    low, high = sorted((found.norm, expected.norm)) if math.isfinite(found.norm) else (0.0, math.inf)
    if high > GRADIENT_FACTOR * low + 1e-6:
        return f"the gradients of the faster model have the norm {found.norm:.4g} instead of {expected.norm:.4g}"
    return None
