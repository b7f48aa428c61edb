"""What a captured graph takes for granted, of its inputs and of the model: each call checks it."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from qat.torch_internals import size_checker

Shapes = list[tuple[int, ...] | None]
"""Shape of each input; None for one that is left out."""


@functools.lru_cache(maxsize=256)
def _checker(conditions: tuple[str, ...]) -> Callable[[Shapes], bool]:
    return size_checker(f"({' and '.join(f'({each})' for each in conditions)})")


def first_broken(conditions: Sequence[str], tensors: Sequence[Tensor | None]) -> str | None:
    """Return the first condition that these shapes do not meet; None if they meet all."""
    shapes = [None if x is None else tuple(x.shape) for x in tensors]
    # Conditions on an input that was left out cannot be checked.
    for left_out in [f"s[{number}]" for number, shape in enumerate(shapes) if shape is None]:
        conditions = [each for each in conditions if left_out not in each]
    if not conditions or _checker(tuple(conditions))(shapes):
        return None
    return next((each for each in conditions if not _checker((each,))(shapes)), None)


def condition_on_batch(graph: fx.Graph) -> str | None:
    """Return a condition on first axes alone that not every batch meets, or None if a graph has none."""
    for node in [each for each in graph.nodes if each.target is expect_sizes]:
        names: tuple[str, ...] = node.args[1]
        for condition in node.args[2]:
            alone = set(re.findall(r"s\[\d+\](\[\d+\])?", condition)) == {"[0]"}
            alone = alone and not condition.endswith("!= 1")  # which torch asks of any axis, for its strides
            if alone and not all(_checker((condition,))([(batch,)] * len(names)) for batch in (1, 2, 3, 5, 64)):
                return _in_words(condition, names)
    return None


def _in_words(condition: str, names: tuple[str, ...]) -> str:
    return re.sub(r"s\[(\d+)\]", lambda found: f"{names[int(found[1])]}.shape", condition)


LONGEST = 120
"""Most characters of a condition that an error message shows."""


@has_side_effect
def expect_sizes(tensors: list[Tensor], names: tuple[str, ...], conditions: tuple[str, ...]) -> None:
    """Raise a ValueError if sizes break a condition for which the graph was made.

    Args:
        tensors: the inputs.
        names: their names in forward.
        conditions: Python expressions of `s[number of the tensor][axis]`.
    """
    if torch.compiler.is_compiling() or (broken := first_broken(conditions, tensors)) is None:
        return
    inside = [number for number in range(len(names)) if f"s[{number}]" in broken]
    broken = _in_words(broken, names)
    given = ", ".join(f"{names[number]} has the shape {tuple(tensors[number].shape)}" for number in inside)
    alike = f"with {broken}, as its example_inputs have"
    if len(broken) > LONGEST:
        alike = "whose sizes lead its forward the way that its example_inputs do"
    raise ValueError(
        f"the model was prepared for inputs {alike}, and {given}; prepare the model again with inputs of this size"
    )


@has_side_effect
def expect_default(value: object, default: object, name: str) -> None:
    """Raise a ValueError if an argument differs from that the model was prepared for."""
    if value is not default and (isinstance(value, Tensor) or value != default):
        raise ValueError(
            f"the model was prepared for its argument {name!r} being {default!r}; to use another, prepare it with"
            " example_inputs that contain one"
        )


EXPECTATIONS = (expect_sizes, expect_default)
"""Functions that check the inputs, at the beginning of a graph."""


class Snapshot:
    """What something was derived from: calls, and what they returned then.

    A model asks at every forward, so most calls run no line of Python.
    """

    def __init__(self, reads: Iterable[Callable[[], object]]) -> None:
        self.reads = [*reads]
        self._values = [read() for read in self.reads]

    def is_unchanged(self) -> bool:
        """Return True if every call returns what it did."""
        return [read() for read in self.reads] == self._values
