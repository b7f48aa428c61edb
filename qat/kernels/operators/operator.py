"""Kernels as operators of torch, which torch.compile takes into its graphs whole; on CUDA, formulas that it fuses."""

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

    Called as ever it runs at once; where torch.compile looks on it becomes one node, which nothing looks into. It has
    no derivative: it is what a Function's forward and backward call. (`torch.library.custom_op` makes room for one, and
    takes twice as long to get to the function.)

    Args:
        shapes: takes the same arguments and returns empty tensors of the shapes, types and strides of the result.
        formula: takes the same arguments and returns the same, made of torch's operations; what `by_formula` asks for.
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
            if by_formula(args[0]) or args[0].dtype in DTYPES[1:]:  # halves, in a backward outside of the context
                found: Result = formula(*args)
                return found
            if torch.compiler.is_compiling():
                result: Result = registered(*args)
                return result
            return function(*args)

        call.library = library  # type: ignore[attr-defined]  # the operator lives as long as this
        return call

    return decorated


def _free_name(name: str) -> str:
    """The name, with a number where a module that was loaded anew (in a notebook, say) brings the operator again.

    Functions that others still hold keep the operator that they have.
    """
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if not hasattr(torch.ops.qat, each))
