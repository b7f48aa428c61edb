"""What tracing changes in torch is changed for the thread that traces, and by one thread at a time.

torch.fx puts its own `__call__` and `__getattr__` on nn.Module, and some functions of torch do not take proxies: both
can only be changed for the whole process. Two threads that did so at once would put back each other's changes; so they
wait for each other. Threads that do anything else get what they would have got.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_one_at_a_time = threading.RLock()


@contextmanager
def tracing_alone() -> Iterator[None]:
    """A context that other threads wait for before they enter it; the same thread may enter it again."""
    with _one_at_a_time:
        yield


@contextmanager
def replaced_here(replacements: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """A context in which functions are replaced for this thread; `tracing_alone` is around it.

    Args:
        replacements: of a module and a function's name, what is to be called instead of it.
    """
    with ExitStack() as patches:
        for (module, name), replacement in replacements.items():
            patches.enter_context(mock.patch.object(module, name, _chosen(getattr(module, name), replacement)))
        yield


@contextmanager
def without_fast_path() -> Iterator[None]:
    """A context in which attention and encoder layers run as plain operators, for this thread; others wait to enter."""
    with tracing_alone(), replaced_here({(torch.backends.mha, "get_fastpath_enabled"): lambda: False}):
        yield


def _chosen(original: Any, replacement: Any) -> Any:
    here = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        # A thread that compiles is another one: what is traced is not compiled.
        elsewhere = torch.compiler.is_compiling() or threading.get_ident() != here
        return (original if elsewhere else replacement)(*args, **kwargs)

    return call
