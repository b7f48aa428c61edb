"""Kernels as torch operators, each one node for torch.compile.

All arguments besides tensors and numbers are packed, since an operator's schema knows lists only:

    grid        a quantizer's scale, smallest scale and zero point (None on a symmetric grid)
    levels      the fields of `Levels`
    qparams     a tensor of step and zero of codes; the step is NaN if one of the values is
    clip        floor and ceiling before the quantizer
    geometry    `Geometry.packed` of a product
    window      kernel, stride, padding, dilation (two numbers each) and ceil_mode of a max pool

A gradient that is not needed comes back empty.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def operator(formula: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function of tensors and numbers the operator torch.ops.qat.<name>.

    An eager call runs the function directly; torch.compile makes the call one opaque node. The operator has no
    derivative: a Function's forward and backward call it. (`torch.library.custom_op` allows for a derivative, and takes
    twice as long to reach the function.)

    Args:
        formula: takes and returns the same, in torch's operations: it tells torch.compile shapes, types and strides of
            the result, and tests compare with it; `formula` of the decorated function.
    """

    def decorated(function: Callable[..., Any]) -> Any:
        name = function.__name__
        library: Any = torch.library.Library("qat", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(
            name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,)
        )
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"qat::{name}", formula, lib=library)
        registered: Any = getattr(torch.ops.qat, name)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return registered(*args) if torch.compiler.is_compiling() else function(*args)

        made: Any = call
        made.library, made.formula = library, formula  # the library keeps the operator alive
        return made

    return decorated
