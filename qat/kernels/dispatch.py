"""Who computes what: compiled kernels on the CPU, Triton's or torch.compile's on CUDA, or the plain formula.

The switches at the top hold in the thread that enters their context, and in torch's own threads where these work for
it: autograd computes the gradients of a GPU's tensors there. Other threads neither see them nor can leave them wrong.
"""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from qat.kernels.cpu import quantizers
from qat.torch_internals import is_stashed, operations_are_watched, stash_for_threads, stashed

CARRIED = "qat.kernels.dispatch"
"""What torch carries to its threads under this name: the switches that are on."""


class _Switches(threading.local):
    """torch.compile watches a plain attribute of each thread, and torch 2.11's cannot read a ContextVar."""

    def __init__(self) -> None:
        self.plain = False
        self.in_float = False
        self.by_formula = False


_switches = _Switches()

_contexts = 0
"""How many contexts of switches are open, in all threads: while there is none, nothing has to be asked."""

_counting = threading.Lock()


@contextmanager
def _on(name: str) -> Iterator[None]:
    before = getattr(_switches, name)
    _count(1)
    setattr(_switches, name, True)
    _carry()
    try:
        yield
    finally:
        setattr(_switches, name, before)
        _carry()
        _count(-1)


def _count(more: int) -> None:
    global _contexts
    with _counting:
        _contexts += more


def _carry() -> None:
    state = _state(tuple(name for name, on in vars(_switches).items() if on))
    _hold(state)
    stash_for_threads(CARRIED, state)


@functools.cache
def _state(names: tuple[str, ...]) -> frozenset[str]:
    """One of eight sets, which live as long as the program."""
    return frozenset(names)


_hold = ctypes.pythonapi.Py_IncRef
"""torch 2.11 gives up a reference to what it carries that it never took; it gets one to give up."""
_hold.argtypes, _hold.restype = [ctypes.py_object], None


def _is_carried(name: str) -> bool:
    """Whether it is on for whom this thread works; code that is being compiled runs in no thread of torch's."""
    if torch.compiler.is_dynamo_compiling() or not _contexts or not is_stashed(CARRIED):
        return False
    return name in stashed(CARRIED)


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


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the tensors that formulas take."""


def by_formula(x: Tensor) -> bool:
    """Whether kernels are formulas for this tensor: on CUDA, where torch.compile makes kernels of them."""
    return x.is_cuda or formulas_wanted()


def is_taken(x: Tensor) -> bool:
    """Whether operators take a tensor: float32 on the CPU, by formula what mixed precision is made of, no subclass."""
    if by_formula(x):
        return x.dtype in DTYPES and type(x) in (Tensor, torch.nn.Parameter)
    return quantizers.is_plain(x)


class Kernels(Protocol):
    """The fake-quantizer of one kind of device: what `qat.functional` calls instead of its formula."""

    @staticmethod
    def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
        """x on its grid."""

    @staticmethod
    def gradients(
        grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
        needs: tuple[bool, ...] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of x, scale and zero_point, without any factor."""


def plain_here() -> bool:
    """Whether only plain operations will do: asked for, or something other than autograd looks at every operation."""
    return torch.compiler.is_compiling() or plain_wanted() or operations_are_watched()


def choose(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> type[Kernels] | None:
    """The kernels for a tensor and its grid; None where the plain formula has to do.

    Args:
        x: what is to be quantized.
        scale: () or broadcastable to x.
        zero_point: as scale, or None for a symmetric grid.
    """
    if plain_here():
        return None
    if x.device.type == "cpu":
        return quantizers.CPUKernels if quantizers.applies(x, scale, zero_point) else None
    triton = _triton() if x.device.type == "cuda" else None
    return triton.TritonKernels if triton is not None and triton.applies(x, scale, zero_point) else None


@functools.cache
def _triton() -> Any:
    """The fake-quantizer on CUDA, loaded where a tensor lies there; None in a copy of qat without that folder."""
    with contextlib.suppress(ModuleNotFoundError):
        from qat.kernels.triton import fake_quantizer

        return fake_quantizer
    return None
