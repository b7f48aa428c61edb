"""Everything in torch and Python that is patched while a model is traced, each patch with the models that need it.

These functions can only be replaced for the whole process. So one thread at a time traces (`tracing_alone`): two that
patched at once would restore each other's patches. A replacement acts in the thread that traces; in any other thread
it calls the original.

    torch.fx                      its own `__call__` and `__getattr__` on nn.Module: every model
    torch.zeros, ones, empty ...  user models that create a tensor of a traced size, `torch.zeros(x.size(0), 8)`
    torch.tensor, as_tensor ...   torchvision's SSD, Faster R-CNN and RAFT: `torch.tensor(x.shape[1])`
    isinstance                    the heads of torchvision's Faster R-CNN, which ask `isinstance(boxes, Tensor)`
    get_fastpath_enabled          nn.TransformerEncoder and nn.MultiheadAttention, whose fast path no graph shows
    _detect_is_causal_mask        nn.TransformerEncoder, which looks at the values of its mask
    BackwardCFunction.__init__    models that apply a torch.autograd.Function, which are refused
    _infer_device_type            models that checkpoint activations (DenseNet, memory-efficient), which are refused
    unwrap_if_dead                the same Functions on torch 2.11, which are refused there without a crash
"""

import builtins
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.fx.proxy import TraceError

from qat.torch_internals import (
    ARGUMENT_UNWRAPPING,
    CAUSAL_MASK_DETECTION,
    CHECKPOINT_START,
    applied_function,
    load_dynamo,
    pytree,
)
from qat.tracing.proxies import HintedValue

SIZED = ("zeros", "ones", "empty", "rand", "randn")
"""Functions of torch that take a size as several numbers."""

CONVERTING = ("as_tensor", "asarray", "tensor")
"""Functions of torch that take any data; a proxy of a size becomes a node."""

tracing_alone = threading.RLock()
"""A context that one thread at a time can be in; the same thread may enter it again."""


@contextmanager
def without_fast_path() -> Iterator[None]:
    """A context in which attention and encoder layers run as plain operators in this thread."""
    with tracing_alone, _replaced_here({(torch.backends.mha, "get_fastpath_enabled"): lambda: False}):
        yield


@contextmanager
def torch_takes_proxies() -> Iterator[None]:
    """A context in which Python code does with proxies what it does with tensors and sizes, in this thread.

    Only `isinstance` takes a proxy for a tensor; a proxy's class stays its own. C++ code that took a proxy for a tensor
    would read memory that does not belong to one.
    """
    load_dynamo()  # tracing imports it anyway, and it must see Python's own `isinstance`
    with without_fast_path():
        replacements: dict[tuple[Any, str], Any] = {
            **{(torch, name): _with_tuple(getattr(torch, name)) for name in SIZED},
            **{(torch, name): _as_node(getattr(torch, name)) for name in CONVERTING},
            CAUSAL_MASK_DETECTION: lambda *_: False,
        }
        knowing = _knowing_proxies(isinstance)
        with _replaced_here(replacements), mock.patch.object(builtins, "isinstance", knowing):
            yield


@contextmanager
def gradients_refused(is_paused: Callable[[], bool]) -> Iterator[None]:
    """A context in which this thread applies no `torch.autograd.Function` and no checkpoint, unless tracing is paused.

    A graph would record only the function's forward, and differentiate that. The patch is on the context object that
    torch creates for every application, since user code may hold a reference to `apply` itself.
    """

    def refuse(context: Any) -> None:
        if not is_paused():
            kind = applied_function(context)
            raise TraceError(f"forward applies {kind.__module__}.{kind.__qualname__}, which has a gradient of its own")

    infer_device = getattr(*CHECKPOINT_START)  # torch asks for the device at the start of every checkpoint

    def refuse_checkpoint(*args: Any) -> Any:
        if not is_paused():
            raise TraceError("forward checkpoints activations, which a graph would keep")
        return infer_device(*args)

    functions: dict[tuple[Any, str], Any] = {
        (BackwardCFunction, "__init__"): refuse,
        CHECKPOINT_START: refuse_checkpoint,
    }
    if ARGUMENT_UNWRAPPING is not None:  # torch 2.11 passes arguments to C++ before it creates the context
        unwrap = getattr(*ARGUMENT_UNWRAPPING)
        functions[ARGUMENT_UNWRAPPING] = lambda x: x if issubclass(type(x), fx.Proxy) else unwrap(x)
    with tracing_alone, _replaced_here(functions):
        yield


@contextmanager
def _replaced_here(replacements: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """A context in which functions, by module and name, are replaced for this thread, inside `tracing_alone`."""
    with ExitStack() as patches:
        for (module, name), replacement in replacements.items():
            patches.enter_context(mock.patch.object(module, name, _chosen(getattr(module, name), replacement)))
        yield


def _chosen(original: Any, replacement: Any) -> Any:
    here = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        # Only another thread compiles: what is traced is not compiled.
        elsewhere = torch.compiler.is_compiling() or threading.get_ident() != here
        return (original if elsewhere else replacement)(*args, **kwargs)

    return call


def _with_tuple(factory: Any) -> Any:
    """`torch.zeros(n, m)` for proxies, as `torch.zeros((n, m))`, which torch takes already."""

    def make(*size: Any, **options: Any) -> Any:
        several = len(size) > 1 and any(isinstance(length, fx.Proxy) for length in size)
        return factory(size, **options) if several else factory(*size, **options)

    return make


def _as_node(convert: Any) -> Any:
    def make(data: Any, *args: Any, **options: Any) -> Any:
        proxy = next((leaf for leaf in pytree.tree_leaves(data) if issubclass(type(leaf), fx.Proxy)), None)
        if proxy is None:
            return convert(data, *args, **options)
        return proxy.tracer.create_proxy("call_function", convert, (data, *args), options)

    return make


def _knowing_proxies(original: Any) -> Any:
    """`isinstance` that answers for a proxy as for the value that it stands for."""

    def knowing(value: Any, kinds: Any, /) -> bool:
        # For anything but a proxy it is the original, in all threads.
        return original(value, kinds) or (issubclass(type(value), HintedValue) and original(value.hint, kinds))

    return knowing
