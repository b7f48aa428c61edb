"""Switches of the whole process: what the kernels are asked for, whatever would be fastest."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Switches:
    """torch.compile watches a plain attribute, and torch 2.11's cannot read a ContextVar."""

    plain: bool = False
    in_float: bool = False
    by_formula: bool = False


_switches = _Switches()


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


@contextmanager
def kernels_by_formula() -> Iterator[None]:
    """A context in which the CPU computes as compiled models on CUDA do, to see that without a GPU.

    Forward and backward belong inside, and `train()` of the model before them.
    """
    before, _switches.by_formula = _switches.by_formula, True
    try:
        yield
    finally:
        _switches.by_formula = before


def integers_allowed() -> bool:
    """Whether products may be computed in integers here."""
    return not _switches.in_float


def plain_wanted() -> bool:
    """Whether plain operations are asked for."""
    return _switches.plain


def formulas_wanted() -> bool:
    """Whether the CPU is to do as CUDA does."""
    return _switches.by_formula
