"""Forward-mode differentiation for every Function of this package, derived from its backward.

`backward` is linear in the gradient that it is given: grad -> J^T grad, with J the Jacobian that the estimator claims.
Forward mode needs J tangent, the transpose of that map, and differentiating `backward` gives it. So no rule has to
write its formula twice, and the two modes cannot disagree.

The `jvp` lives in a subclass that is used outside compilation only, because Dynamo refuses a Function that defines one.
"""

import functools
from typing import Any

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """`function.apply(*inputs)`, differentiable in forward mode too (`torch.func.jvp`, `jacfwd`, dual tensors).

    Args:
        function: with `forward` and `setup_context` apart, one output tensor, and a `backward` made of differentiable
            operations on `ctx.saved_tensors`.
        inputs: what its `forward` takes.

    >>> from qat.functional.rounding import RoundSTEFunction
    >>> torch.func.jvp(lambda x: apply(RoundSTEFunction, x), (torch.tensor(0.7),), (torch.tensor(3.0),))
    (tensor(1.), tensor(3.))
    """
    chosen = function if torch.compiler.is_compiling() else _with_forward_mode(function)
    result: Tensor = chosen.apply(*inputs)
    return result


class _BackwardContext:
    """The ctx that `backward` sees while forward mode transposes it: it asks for the slots that have a tangent."""

    def __init__(self, ctx: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors
        self.needs_input_grad = needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


@functools.cache
def _with_forward_mode(function: Any) -> Any:
    """The subclass of a Function that has a jvp as well; of the same name, which autograd's messages show."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        function.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*(getattr(ctx, "to_save", None) or ()))
        ctx.output_shape, ctx.output_dtype = output.shape, output.dtype

    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        given = [tangent for tangent in tangents if isinstance(tangent, Tensor)]
        context = _BackwardContext(ctx, tuple(isinstance(tangent, Tensor) for tangent in tangents))
        cotangent = given[0].new_zeros(ctx.output_shape, dtype=ctx.output_dtype)

        def transposed(grad: Tensor) -> tuple[Tensor, ...]:
            gradients = function.backward(context, grad)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            return tuple(
                torch.zeros_like(tangent) if gradient is None else gradient
                for gradient, tangent in zip(gradients, tangents, strict=True)
                if isinstance(tangent, Tensor)
            )

        tangent: Tensor = torch.func.vjp(transposed, cotangent)[1](tuple(given))[0]
        return tangent

    body = {"setup_context": staticmethod(setup_context), "jvp": staticmethod(jvp), "__module__": function.__module__}
    return type(function.__name__, (function,), body)
