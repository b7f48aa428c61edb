"""Kernels as torch operators, each one node for torch.compile; on CUDA, formulas that it fuses."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from qat.kernels.dispatch import DTYPES, by_formula

Result = TypeVar("Result")


def operator(
    shapes: Callable[..., Any], formula: Callable[..., Any]
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator that makes a function of tensors and numbers the operator torch.ops.qat.<name>.

    An eager call runs the function directly; torch.compile makes the call one opaque node. The operator has no
    derivative: a Function's forward and backward call it. (`torch.library.custom_op` allows for a derivative, and takes
    twice as long to reach the function.)

    Args:
        shapes: takes the same arguments and returns empty tensors of the shapes, types and strides of the result.
        formula: takes and returns the same, in torch's operations; it runs where `by_formula` says so.
    """

    def decorated(function: Callable[..., Result]) -> Callable[..., Result]:
        name = _free_name(function.__name__)
        library: Any = torch.library.Library("qat", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(
            name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,)
        )
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"qat::{name}", shapes, lib=library)
        registered: Any = getattr(torch.ops.qat, name)

        @functools.wraps(function)
        def call(*args: Any) -> Result:
            if by_formula(args[0]) or args[0].dtype in DTYPES[1:]:  # half precision, in a backward outside the context
                found: Result = formula(*args)
            elif torch.compiler.is_compiling():
                found = registered(*args)
            else:
                found = function(*args)
            return found

        call.library = library  # type: ignore[attr-defined]  # keeps the operator alive
        return call

    return decorated


def _free_name(name: str) -> str:
    """The name, with a number if it is taken: a reloaded module (in a notebook, say) defines its operators again.

    Functions of the old module keep their operator.
    """
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if not hasattr(torch.ops.qat, each))
