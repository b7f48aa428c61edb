"""Patches of torch and Python during a capture, each with the models that need it.

These functions can only be replaced for the whole process. So one thread at a time captures (`capturing_alone`): two
that patched at once would restore each other's patches. A replacement acts in the thread that captures; in any other
thread it calls the original.

    len                           models that ask `len(x)`, which must be an int and so would fix the size
    scaled_dot_product_attention  torch's own Python code that calls it; `Watching` sees the calls of others
    _extract_tensor_metadata      deep models with free sizes: a third of an export asks for layouts that no one reads
    print of torch.export         models that cannot be captured, whose whole graph it would write to stderr
    CheckpointFunction.apply      reentrant checkpoints, which run under no_grad and so would cut the gradients
    get_fastpath_enabled          nn.TransformerEncoder and nn.MultiheadAttention, whose fast path no graph shows
    _detect_is_causal_mask        nn.TransformerEncoder, which looks at the values of its mask
    nn.Module.training            models that never ask for the mode have the same graph in both
    BackwardCFunction.__init__    models that apply a torch.autograd.Function, which are refused
"""

import builtins
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from qat.graph.attention import scaled_dot_product_attention
from qat.graph.side_effects import CaptureError
from qat.torch_internals import (
    CAUSAL_MASK_DETECTION,
    CHECKPOINT,
    Patchable,
    applied_function,
    export_printing,
    layout_noting,
    load_dynamo,
)

capturing_alone = threading.RLock()
"""A context that one thread at a time can be in; the same thread may enter it again."""


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Run attention and encoder layers as plain operators in this thread."""
    with capturing_alone, _replaced_here({(torch.backends.mha, "get_fastpath_enabled"): lambda: False}):
        yield


@contextmanager
def torch_as_captured(is_paused: Callable[[], bool]) -> Iterator[None]:
    """Run Python in this thread so that an export can record it, except in leaves.

    A `torch.autograd.Function` is refused, since a graph would record its forward and differentiate that.
    """

    # User code may hold a reference to `apply`: torch creates a context object for every application.
    def refuse(context: object) -> None:
        kind = applied_function(context)
        if not is_paused() and not kind.__module__.startswith("torch."):  # an operator of torch.library stays one
            raise CaptureError(
                f"forward applies {kind.__module__}.{kind.__qualname__}, which has a gradient of its own"
            )

    load_dynamo()  # an export imports it, and it must see Python's own `len`
    replacements: dict[Patchable, Callable[..., object]] = {
        (F, "scaled_dot_product_attention"): scaled_dot_product_attention,
        CHECKPOINT: lambda function, preserve, *args: function(*args),
        export_printing(): lambda *_, **__: None,
        layout_noting(): lambda *_, **__: None,
        CAUSAL_MASK_DETECTION: lambda *_: False,
        (BackwardCFunction, "__init__"): refuse,
    }
    with without_fast_path(), _replaced_here(replacements), mock.patch.object(builtins, "len", _free_length(len)):
        yield


@contextmanager
def mode_is_asked(is_paused: Callable[[], bool]) -> Iterator[list[nn.Module]]:
    """Collect the modules whose code asks for their mode in this thread."""
    asked: list[nn.Module] = []
    here = threading.get_ident()

    def read(module: nn.Module) -> bool:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        caller = str(frame.f_back.f_globals.get("__name__", ""))
        by_model = not caller.startswith("torch.") or caller.startswith("torch.nn.")
        if by_model and threading.get_ident() == here and not is_paused():
            asked.append(module)
        return bool(vars(module)["training"])

    def write(module: nn.Module, training: bool) -> None:
        vars(module)["training"] = training

    with capturing_alone:
        nn.Module.training = property(read, write)  # type: ignore[assignment]
        try:
            yield asked
        finally:
            del nn.Module.training  # instances have attributes of their own again


def _free_length(original: Callable[[Sized], int]) -> Callable[[Sized], int]:
    here = threading.get_ident()

    def length(x: Sized) -> int:
        if not isinstance(x, Tensor) or not x.dim() or threading.get_ident() != here:
            return original(x)
        return x.shape[0]  # a SymInt, where `len` has to return an int

    return length


@contextmanager
def _replaced_here(replacements: Mapping[Patchable, Callable[..., object]]) -> Iterator[None]:
    with ExitStack() as patches:
        for (module, name), replacement in replacements.items():
            original = getattr(module, name, None) or getattr(builtins, name)
            patches.enter_context(mock.patch.object(module, name, _chosen(original, replacement), create=True))
        yield


def _chosen(original: Callable[..., object], replacement: Callable[..., object]) -> Callable[..., object]:
    here = threading.get_ident()

    def call(*args: object, **kwargs: object) -> object:
        # Only another thread compiles: what is captured is not compiled.
        elsewhere = torch.compiler.is_dynamo_compiling() or threading.get_ident() != here
        return (original if elsewhere else replacement)(*args, **kwargs)

    return call
