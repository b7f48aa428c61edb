"""Who computes what: compiled kernels on the CPU, Triton's or torch.compile's on CUDA, or the plain formula.

The switches hold in the thread that enters their context, and in torch's own threads while they work for it: autograd
computes the gradients of a GPU's tensors there. Other threads neither see them nor can leave them wrong.
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
"""The name under which torch carries the switches that are on to its threads."""


class _Switches(threading.local):
    """Thread-local attributes, because torch.compile guards on them; torch 2.11's cannot read a ContextVar."""

    def __init__(self) -> None:
        self.plain = False
        self.in_float = False
        self.by_formula = False


_switches = _Switches()

_contexts = 0
"""How many contexts of switches are open in all threads; with none open, torch need not be asked."""

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
    """One of at most eight sets, kept alive by the cache as long as the program runs."""
    return frozenset(names)


_hold = ctypes.pythonapi.Py_IncRef
"""torch 2.11 releases a reference to the stashed object that it never took, so each stash adds one."""
_hold.argtypes, _hold.restype = [ctypes.py_object], None


def _is_carried(name: str) -> bool:
    """Whether the thread that this one works for has the switch on; Dynamo never traces in such a worker thread."""
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
    """A context in which training multiplies in float on the same grids, even where integers would be faster."""
    with _on("in_float"):
        yield


@contextmanager
def kernels_by_formula() -> Iterator[None]:
    """A context in which the CPU computes as compiled models do on CUDA, so that this can be tested without a GPU.

    Call `train()` of the model inside, then forward and backward.
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
    """Whether the CPU is to compute as CUDA does."""
    return _switches.by_formula or _is_carried("by_formula")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that formulas take."""


def by_formula(x: Tensor) -> bool:
    """Whether formulas replace kernels for this tensor: on CUDA, where torch.compile makes kernels of them."""
    return x.is_cuda or formulas_wanted()


def is_taken(x: Tensor) -> bool:
    """Whether operators take a tensor: float32 on the CPU, `DTYPES` by formula; never a subclass of Tensor."""
    if by_formula(x):
        return x.dtype in DTYPES and type(x) in (Tensor, torch.nn.Parameter)
    return quantizers.is_plain(x)


class Kernels(Protocol):
    """The fake-quantizer for one kind of device, which `qat.functional` calls instead of its formula."""

    @staticmethod
    def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
        """Round x to its grid."""

    @staticmethod
    def gradients(
        grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int,
        needs: tuple[bool, ...] = (True, True, True),
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of x, scale and zero_point, without any factor."""


def plain_here() -> bool:
    """Whether plain operations have to run: they are asked for, or something besides autograd watches operations."""
    return torch.compiler.is_compiling() or plain_wanted() or operations_are_watched()


def choose(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> type[Kernels] | None:
    """The kernels for a tensor and its grid, or None if the plain formula has to run.

    Args:
        x: the tensor to quantize.
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
    """The fake-quantizer on CUDA, loaded for the first tensor there; None in a copy of qat without that folder."""
    with contextlib.suppress(ModuleNotFoundError):
        from qat.kernels.triton import fake_quantizer

        return fake_quantizer
    return None
