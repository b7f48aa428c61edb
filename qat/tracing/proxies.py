"""What a proxy passes for while a model is traced: for a tensor in Python code, never in C++.

C++ that takes a proxy for a tensor reads memory that is none. So `isinstance` alone says of a proxy what it stands for,
and a proxy's class is its own.
"""

import builtins
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._functorch import utils as functorch
from torch.autograd.function import BackwardCFunction
from torch.fx.proxy import TraceError
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from qat.tracing.hints import Known
from qat.tracing.patches import replaced_here, tracing_alone, without_fast_path

SIZED = ("zeros", "ones", "empty", "rand", "randn")
"""Functions that take a size as several numbers."""

CONVERTING = ("as_tensor", "asarray", "tensor")
"""Functions that take any data, and do not ask it what it is."""


@contextmanager
def torch_takes_proxies() -> Iterator[None]:
    """A context in which Python code does with proxies what it does with tensors and sizes.

    `torch.zeros(n, m)` takes proxies as sizes, as torch itself takes `torch.zeros((n, m))`; transformers take their
    plain way, not the fast path that no graph shows, and do not look whether a mask's values happen to be causal.
    All this holds in the thread that enters; another one that wants to enter waits.
    """
    # Tracing imports it anyway, and it notes at its import which functions are Python's own.
    importlib.import_module("torch._dynamo")
    with without_fast_path():
        replacements: dict[tuple[Any, str], Any] = {
            **{(torch, name): _with_tuple(getattr(torch, name)) for name in SIZED},
            **{(torch, name): _as_node(getattr(torch, name)) for name in CONVERTING},
            (transformer, "_detect_is_causal_mask"): lambda *_: False,
        }
        with replaced_here(replacements), mock.patch.object(builtins, "isinstance", _knowing_proxies(isinstance)):
            yield


@contextmanager
def gradients_refused(looks_away: Callable[[], bool]) -> Iterator[None]:
    """A context in which this thread applies no `torch.autograd.Function`, and no checkpoint.

    Of a function a graph would have only the forward, and differentiate that.

    torch makes a context for every application of one, which no reference to `apply` goes around.

    Args:
        looks_away: whether to let one pass.
    """

    def refuse(context: Any) -> None:
        if not looks_away():
            kind = type(context)._forward_cls
            raise TraceError(f"forward applies {kind.__module__}.{kind.__qualname__}, which has a gradient of its own")

    infer_device = checkpoint._infer_device_type  # torch asks for the device at the start of every checkpoint

    def refuse_checkpoint(*args: Any) -> Any:
        if not looks_away():
            raise TraceError("forward checkpoints activations, which a graph would keep")
        return infer_device(*args)  # type: ignore[no-untyped-call]

    functions: dict[tuple[Any, str], Any] = {
        (BackwardCFunction, "__init__"): refuse,
        (checkpoint, "_infer_device_type"): refuse_checkpoint,
    }
    if hasattr(functorch, "unwrap_if_dead"):  # torch 2.11 hands arguments to C++ before it makes the context
        unwrap = functorch.unwrap_if_dead
        functions[functorch, "unwrap_if_dead"] = lambda x: x if issubclass(type(x), fx.Proxy) else unwrap(x)
    with tracing_alone(), replaced_here(functions):
        yield


def _with_tuple(factory: Any) -> Any:
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
    def knowing(value: Any, kinds: Any, /) -> bool:
        # Whatever is no proxy is asked as ever, in all threads.
        return original(value, kinds) or (issubclass(type(value), Known) and original(value.hint, kinds))

    return knowing
