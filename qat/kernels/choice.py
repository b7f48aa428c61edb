"""Which kernels a tensor gets: compiled ones on the CPU, Triton's on CUDA, or none, which means the plain formula."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qat.kernels import cpu, triton

Kernels = type[cpu.CPUKernels] | type[triton.TritonKernels]
"""The fake-quantizer of one device: `quantize` and `gradients`, what `qat.functional` calls instead of its formula."""


@dataclass
class _Switches:
    """Of the whole process; torch.compile watches a plain attribute, and torch 2.11's cannot read a ContextVar."""

    plain: bool = False
    in_float: bool = False


_switches = _Switches()


@contextmanager
def plain_formulas() -> Iterator[None]:
    """A context in which everything runs as plain torch operations: for second derivatives, and to compare.

    >>> from qat.functional import lsq_quantize
    >>> x, scale = torch.randn(100), torch.tensor(0.1)
    >>> with plain_formulas():
    ...     expected = lsq_quantize(x, scale, -8, 7)
    >>> torch.equal(lsq_quantize(x, scale, -8, 7), expected)
    True
    """
    before, _switches.plain = _switches.plain, True
    try:
        yield
    finally:
        _switches.plain = before


@contextmanager
def float_products() -> Iterator[None]:
    """A context in which training multiplies in float, on the same grids, also where integers would be faster."""
    before, _switches.in_float = _switches.in_float, True
    try:
        yield
    finally:
        _switches.in_float = before


def integers_allowed() -> bool:
    """Whether products may be computed in integers here."""
    return not _switches.in_float


def plain_wanted() -> bool:
    """Whether plain operations are asked for."""
    return _switches.plain


def plain_here() -> bool:
    """Whether only plain operations will do: asked for, or something other than autograd looks at every operation."""
    return (
        torch.compiler.is_compiling()
        or _switches.plain
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def choose(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Kernels | None:
    """The kernels for a tensor and its grid; None where the plain formula has to do.

    Args:
        x: what is to be quantized.
        scale: () or broadcastable to x.
        zero_point: as scale, or None for a symmetric grid.
    """
    if plain_here():
        return None
    if x.device.type == "cpu":
        return cpu.CPUKernels if cpu.applies(x, scale, zero_point) else None
    return triton.TritonKernels if x.device.type == "cuda" and triton.applies(x, scale, zero_point) else None
