"""What a captured graph takes for granted of its inputs; each call checks it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from qat.torch_internals import size_checker


@functools.lru_cache(maxsize=256)
def _checker(conditions: tuple[str, ...]) -> Callable[[list[Any]], bool]:
    checker: Callable[[list[Any]], bool] = size_checker(f"({' and '.join(f'({each})' for each in conditions)})")
    return checker


def first_broken(conditions: Sequence[str], tensors: list[Any]) -> str | None:
    """The first condition that the shapes of these tensors do not meet; None if they meet all."""
    shapes = [None if x is None else tuple(x.shape) for x in tensors]
    for left_out in [f"s[{number}]" for number, shape in enumerate(shapes) if shape is None]:
        conditions = [each for each in conditions if left_out not in each]
    if not conditions or _checker(tuple(conditions))(shapes):
        return None
    return next((each for each in conditions if not _checker((each,))(shapes)), None)


LONGEST = 120
"""Characters of a condition that somebody reads."""


@has_side_effect
def expect_sizes(tensors: list[Tensor], names: tuple[str, ...], conditions: tuple[str, ...]) -> None:
    """Raise a ValueError if sizes do not meet the conditions under which the graph is the model.

    Args:
        tensors: the inputs.
        names: what forward calls them.
        conditions: Python expressions of `s[number of the tensor][axis]`.
    """
    if torch.compiler.is_compiling() or (broken := first_broken(conditions, tensors)) is None:
        return
    inside = [number for number in range(len(names)) if f"s[{number}]" in broken]
    for number in inside:
        broken = broken.replace(f"s[{number}]", f"{names[number]}.shape")
    given = ", ".join(f"{names[number]} has the shape {tuple(tensors[number].shape)}" for number in inside)
    alike = (
        f"with {broken}, as its example_inputs have"
        if len(broken) <= LONGEST
        else ("whose sizes lead its forward the way that its example_inputs do")
    )
    raise ValueError(
        f"the model was prepared for inputs {alike}, and {given}; prepare the model again with inputs of this size"
    )


@has_side_effect
def expect_default(value: Any, default: Any, name: str) -> None:
    """Raise a ValueError if an argument of forward is not what the model was prepared for."""
    if value is not default and (isinstance(value, Tensor) or value != default):
        raise ValueError(
            f"the model was prepared for its argument {name!r} being {default!r}; to use another, prepare it with"
            " example_inputs that contain one"
        )


EXPECTATIONS = (expect_sizes, expect_default)
"""Functions that check the inputs, at the beginning of a graph."""
