"""Dispatch between kernels: C on the CPU, Triton on a GPU, or the plain formula.

The switches hold in the thread that enters their context; other threads do not see them.
"""

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from qat.kernels.cpu import quantizers
from qat.torch_internals import operations_are_watched

TRITON_DEVICES = {"cuda"}
"""Devices of Triton's kernels; tests add the CPU, for Triton's interpreter."""

log = logging.getLogger("qat.kernels")


class _Switches(threading.local):
    # Thread-local attributes, because torch.compile guards on them; torch 2.11's cannot read a ContextVar.
    def __init__(self) -> None:
        self.plain = False
        self.in_float = False


_switches = _Switches()


@contextmanager
def _on(name: str) -> Iterator[None]:
    before = getattr(_switches, name)  # contexts may be nested
    setattr(_switches, name, True)
    try:
        yield
    finally:
        setattr(_switches, name, before)


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Run everything in this context as plain torch operations.

    It is for second derivatives, and to compare.

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
    """Train with products in float on the same grids, even where integers are faster."""
    with _on("in_float"):
        yield


def integers_allowed() -> bool:
    """Return True if products may be computed in integers here."""
    return not _switches.in_float


def plain_wanted() -> bool:
    """Return True if plain operations are asked for."""
    return _switches.plain


def plain_here() -> bool:
    """Return True if plain operations have to run.

    They are asked for, or something besides autograd watches operations.
    """
    return torch.compiler.is_compiling() or plain_wanted() or operations_are_watched()


def choose(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> type[quantizers.CPUKernels] | None:
    """Return the kernels for x and its grid, or None for the plain formula.

    scale and zero_point are those of `lsq_quantize`.
    """
    if plain_here():
        return None
    if not passes_values(x):
        return quantizers.CPUKernels if x.is_cpu and quantizers.applies(x, scale, zero_point) else None
    found = triton_kernels() if _launches_at(x) else None  # Triton launches on the current device
    if found is None or not found.applies(x, scale, zero_point):
        return None
    return cast("type[quantizers.CPUKernels]", found.TritonKernels)


def passes_values(x: Tensor) -> bool:
    """Return True if kernels that train on x's device write values, and no codes.

    Layers pass these values on.
    """
    return x.device.type in TRITON_DEVICES


def _launches_at(x: Tensor) -> bool:
    # Triton launches on the current device.
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return False
    tried = bool(triton_kernels.cache_info().currsize)
    return passes_values(x) and (tried or not (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def triton_here(x: Tensor, evaluates: bool = False) -> ModuleType | None:
    """Return the module of Triton's kernels over chains or codes if they take x."""
    found = triton_kernels() if type(x) is Tensor and not plain_here() and _launches_at(x) else None
    if found is None or not (evaluates or x.dtype in found.DTYPES):
        return None
    from qat.kernels.triton import chains, codes

    return codes if evaluates else chains


@functools.cache
def triton_kernels() -> ModuleType | None:
    """Return the module of kernels in Triton, tried once, or None; the log says why."""
    if os.environ.get("QAT_KERNELS", "").lower() == "off":
        log.info("QAT_KERNELS=off: quantizers run as plain torch operations")
        return None
    try:
        from qat.kernels.triton import chains
        from qat.kernels.triton import quantizers as found

        device = min(TRITON_DEVICES)
        x, scale = torch.tensor([0.26, -9.0, 0.5], device=device), torch.tensor(0.5, device=device)
        y = found.TritonKernels.quantize(x, scale, None, -8, 7)
        if y.tolist() == [0.5, -4.0, 0.5] and chains.works(x, scale):  # a wrong compiler is as bad as none
            return found
        reason = "they are wrong here"
    except Exception as error:  # no Triton, no compiler for it, a card older than it supports
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    log.warning("no kernels in Triton (%s): quantizers run as plain torch operations, slower", reason)
    return None
