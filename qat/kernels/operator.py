"""Kernels as operators of torch, which torch.compile takes into its graphs whole."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def operator(shapes: Callable[..., Any]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator that makes a function of tensors and numbers the operator torch.ops.qat.<name>.

    Called as ever it runs at once; where torch.compile looks on it becomes one node, which nothing looks into.

    Args:
        shapes: takes the same arguments and returns empty tensors of the shapes, types and strides of the result.
    """

    def decorated(function: Callable[..., Result]) -> Callable[..., Result]:
        registered: Any = torch.library.custom_op(
            f"qat::{function.__name__}", function, mutates_args=(), device_types="cpu"
        )
        registered.register_fake(shapes)

        @functools.wraps(function)
        def call(*args: Any) -> Result:
            if torch.compiler.is_compiling():
                result: Result = registered(*args)
                return result
            return function(*args)

        return call

    return decorated
