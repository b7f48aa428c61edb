"""Switches of a thread: what the kernels are asked for, whatever would be fastest.

They hold in the thread that enters the context, and in torch's own threads where these work for it: autograd computes
the gradients of a GPU's tensors there. Other threads neither see them nor can leave them wrong.
"""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CARRIED = "qat.kernels.switches"
"""What torch carries to its threads under this name: the switches that are on."""


class _Switches(threading.local):
    """torch.compile watches a plain attribute of each thread, and torch 2.11's cannot read a ContextVar."""

    def __init__(self) -> None:
        self.plain = False
        self.in_float = False
        self.by_formula = False


_switches = _Switches()


@contextmanager
def _on(name: str) -> Iterator[None]:
    before = getattr(_switches, name)
    setattr(_switches, name, True)
    _carry()
    try:
        yield
    finally:
        setattr(_switches, name, before)
        _carry()


def _carry() -> None:
    state = _state(tuple(name for name, on in vars(_switches).items() if on))
    _hold(state)
    torch._C._stash_obj_in_tls(CARRIED, state)


@functools.cache
def _state(names: tuple[str, ...]) -> frozenset[str]:
    """One of eight sets, which live as long as the program."""
    return frozenset(names)


_hold = ctypes.pythonapi.Py_IncRef
"""torch 2.11 gives up a reference to what it carries that it never took; it gets one to give up."""
_hold.argtypes, _hold.restype = [ctypes.py_object], None


def _is_carried(name: str) -> bool:
    """Whether it is on for whom this thread works; code that is being compiled runs in no thread of torch's."""
    if torch.compiler.is_compiling() or not torch._C._is_key_in_tls(CARRIED):
        return False
    return name in torch._C._get_obj_in_tls(CARRIED)


@contextmanager
def plain_formulas() -> Iterator[None]:
    """A context in which everything runs as plain torch operations: for second derivatives, and to compare.

    >>> import torch
    >>> from qat.functional import lsq_quantize
    >>> x, scale = torch.randn(100), torch.tensor(0.1)
    >>> with plain_formulas():
    ...     expected = lsq_quantize(x, scale, -8, 7)
    >>> torch.equal(lsq_quantize(x, scale, -8, 7), expected)
    True
    """
    with _on("plain"):
        yield


@contextmanager
def float_products() -> Iterator[None]:
    """A context in which training multiplies in float, on the same grids, also where integers would be faster."""
    with _on("in_float"):
        yield


@contextmanager
def kernels_by_formula() -> Iterator[None]:
    """A context in which the CPU computes as compiled models on CUDA do, to see that without a GPU.

    Forward and backward belong inside, and `train()` of the model before them.
    """
    with _on("by_formula"):
        yield


def integers_allowed() -> bool:
    """Whether products may be computed in integers here."""
    return not (_switches.in_float or _is_carried("in_float"))


def plain_wanted() -> bool:
    """Whether plain operations are asked for."""
    return _switches.plain or _is_carried("plain")


def formulas_wanted() -> bool:
    """Whether the CPU is to do as CUDA does."""
    return _switches.by_formula or _is_carried("by_formula")
