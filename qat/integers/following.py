"""A model run along another runtime's integers, to compare layer by layer."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from qat.integers.evaluation import numbered
from qat.integers.frozen import stored_offset
from qat.quantizer import Quantizer

ROUNDING = 1e-5
"""Error of float32 sums in any order, as a share of the largest magnitude."""

NEAR_TIE = 0.01
"""Distance from a tie, in levels, at which float32 rounding decides the integer.

It is several hundred times what was seen in any model, and far less than what another scale or a second rounding moves
a value by.
"""


@dataclass(frozen=True)
class LayerDifference:
    """One quantizer's integers in a runtime and in torch, of the same input integers.

    Attributes:
        name: the quantizer.
        elements: integers compared.
        differing: how many are not equal.
        largest: largest difference, in levels.
        beyond_ties: how many of those that differ are no near-ties: torch's value would have to be off by more than
            `NEAR_TIE` levels to be rounded to the other integer.
        fused: the quantizers between which the runtime fuses what it computes otherwise, unless one of them is read;
            `name` is then the quantizer or output where that shows.
    """

    name: str
    elements: int
    differing: int
    largest: int
    beyond_ties: int = 0
    fused: tuple[str, ...] = ()


class Follower:
    """Makes a model continue at every quantizer with another runtime's integers.

    Args:
        calls: from `quantizer_calls`.
        integers: of the other runtime, as stored, by the names of the calls. A format may merge equal calls: of
            these one is enough.
        file: where they come from, for errors.

    Attributes:
        differences: of every call, in the order in which the model runs.
    """

    def __init__(self, calls: dict[str, list[str]], integers: dict[str, Tensor], file: str) -> None:
        self.calls, self.integers, self.file = calls, integers, file
        self.differences: list[LayerDifference] = []
        self._seen: Counter[str] = Counter()
        # Only then are inputs kept, to find the equal call.
        self._merged = any(name not in integers for names in calls.values() for name in names)
        self._followed: list[tuple[Quantizer, Tensor, Tensor]] = []

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Let the model follow in this context; without integers it is a ValueError."""
        with ExitStack() as hooks:
            for path in self.calls:
                quantizer = model.get_submodule(path)
                hooks.enter_context(quantizer.register_forward_hook(partial(self._follow, path)))
            yield

    def _follow(self, path: str, quantizer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        assert isinstance(quantizer, Quantizer)
        name = numbered(path, self._seen)
        theirs = self._theirs(name, quantizer, args[0]) - stored_offset(quantizer)
        self.differences.append(_difference(name, quantizer, args[0], theirs))
        scale, zero_point = quantizer.grid()
        values: Tensor = ((theirs - zero_point) * scale).to(output.dtype)
        return values

    def _theirs(self, name: str, quantizer: Quantizer, x: Tensor) -> Tensor:
        # The other runtime's integers for a call, or for the equal call that it was merged with.
        integers = self.integers.get(name)
        if integers is None:
            codes = quantizer.codes(x)
            scale, zero_point = quantizer.grid()
            if torch.equal((codes - zero_point) * scale, x):  # on the grid already: a format leaves the call out
                return codes + stored_offset(quantizer)
            equal = [found for other, read, found in self._followed if _is_same_call(other, read, quantizer, x)]
            if not equal:
                raise no_quantizer(self.file, name)
            integers = equal[0]
        if self._merged:
            self._followed.append((quantizer, x, integers))
        return integers.float().reshape(x.shape)  # a .tflite file holds rows as images


def _difference(name: str, quantizer: Quantizer, x: Tensor, theirs: Tensor) -> LayerDifference:
    gap = (quantizer.codes(x) - theirs).abs()
    gap = gap.nan_to_num(nan=float(quantizer.span()))  # a NaN of torch equals no integer
    differing = int((gap > 0).sum())
    if not differing:
        return LayerDifference(name, gap.numel(), 0, 0)
    step = quantizer.grid()[0] * max(NEAR_TIE, ROUNDING * float(quantizer.span()))
    near = (quantizer.codes(x - step) <= theirs) & (theirs <= quantizer.codes(x + step))
    return LayerDifference(name, gap.numel(), differing, int(gap.max()), int((~near).sum()))


def no_quantizer(file: str, name: str) -> ValueError:
    """Return the error of a file that lacks a quantizer."""
    return ValueError(f"compare_layers: {file} has no quantizer {name!r}; was it made from this model?")


def _is_same_call(quantizer: Quantizer, x: Tensor, other: Quantizer, y: Tensor) -> bool:
    same_grid = all(torch.equal(a, b) for a, b in zip(quantizer.grid(), other.grid(), strict=True))
    return same_grid and quantizer.bounds() == other.bounds() and torch.equal(x, y)
