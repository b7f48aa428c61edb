"""Kernels as operators of torch, which torch.compile takes into its graphs whole."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


_library: Any = torch.library.Library("qat", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(shapes: Callable[..., Any]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator that makes a function of tensors and numbers the operator torch.ops.qat.<name>.

    Called as ever it runs at once; where torch.compile looks on it becomes one node, which nothing looks into. It has
    no derivative: it is what a Function's forward and backward call. (`torch.library.custom_op` makes room for one, and
    takes twice as long to get to the function.)

    Args:
        shapes: takes the same arguments and returns empty tensors of the shapes, types and strides of the result.
    """

    def decorated(function: Callable[..., Result]) -> Callable[..., Result]:
        name = function.__name__
        _library.define(
            name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,)
        )
        _library.impl(name, function, "CPU")
        torch.library.register_fake(f"qat::{name}", shapes, lib=_library)
        registered: Any = getattr(torch.ops.qat, name)

        @functools.wraps(function)
        def call(*args: Any) -> Result:
            if torch.compiler.is_compiling():
                result: Result = registered(*args)
                return result
            return function(*args)

        return call

    return decorated
