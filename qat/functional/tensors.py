"""Shared parts of the estimators: arguments, dtypes, scales and forward mode.

Forward mode (`torch.func.jvp`) comes from the backward. `backward` is linear in the gradient that it is given:
grad -> J^T grad, with J the Jacobian that the estimator declares. Forward mode needs J tangent, the transpose of that
map, and differentiating `backward` gives it. So no rule writes its formula twice, and the two modes cannot disagree.
"""

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

MOST_BITS = 16  # the widest grids
SMALLEST_SCALE = 1e-12  # of a learned scale: the product of two is still a normal float32
LARGEST_SCALE = 1e18  # the product of two, and the square of one, are still finite in float32


class STEFunction(torch.autograd.Function):
    """Base of the Functions here, which `torch.func` may map.

    It keeps all inputs for the backward. Tensors are in `ctx.saved_tensors`, all else in `ctx.options`, each in the
    order of the inputs. A Function that does not need all of them has a `setup_context` of its own.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the inputs: what follows from them is cheaper to compute again."""
        ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))
        ctx.options = tuple(each for each in inputs if not isinstance(each, Tensor))


def apply(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """Call `function.apply(*inputs)`, differentiable in forward mode too.

    That is `torch.func.jvp`, `jacfwd` and dual tensors. The function has `forward` and `setup_context` apart, one
    output tensor, and a `backward` made of differentiable operations on `ctx.saved_tensors`.

    >>> from qat.functional.rounding import RoundSTEFunction
    >>> torch.func.jvp(lambda x: apply(RoundSTEFunction, x, torch.round), (torch.tensor(0.7),), (torch.tensor(3.0),))
    (tensor(1.), tensor(3.))
    """
    # Dynamo refuses a Function that defines a jvp, so it lives in a subclass that is used outside compilation only.
    chosen = function if torch.compiler.is_compiling() else _with_forward_mode(function)
    result: Tensor = chosen.apply(*inputs)
    return result


class _BackwardContext:
    # The ctx that `backward` sees while forward mode transposes it: it asks for the slots that have a tangent.

    def __init__(self, ctx: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self._ctx = ctx
        self.saved_tensors = ctx.saved_tensors
        self.needs_input_grad = needs_input_grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


@functools.cache
def _with_forward_mode(function: Any) -> Any:
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
    return type(function.__name__, (function,), body)  # of the same name, which autograd's messages show


def require_floating(x: Tensor, caller: str) -> Tensor:
    """Return x if it is floating point, else raise a TypeError."""
    if not x.is_floating_point():
        raise TypeError(f"{caller}: x must be a floating-point tensor, got {x.dtype}")
    return x


def check_bounds(qmin: int, qmax: int, caller: str) -> None:
    """Refuse an empty grid."""
    if qmin >= qmax:
        raise ValueError(f"{caller}: qmin must be below qmax, got qmin={qmin} and qmax={qmax}")


def check_bits(bits: int, caller: str, fewest: int = 1, most: int = MOST_BITS) -> None:
    """Refuse a bit-width that the rule has no levels for."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not fewest <= bits <= most:
        raise ValueError(f"{caller}: bits must be a whole number from {fewest} to {most}, got {bits!r}")


def check_known(what: str, name: str, known: Collection[str], caller: str) -> None:
    """Refuse a gradient, format or rounding that the estimator does not have."""
    if name not in known:
        raise ValueError(f"{caller}: unknown {what} {name!r}; known: {', '.join(known)}")


def tensor_beside(x: Tensor, value: Tensor | float) -> Tensor:
    """Return a parameter as a tensor beside x, a number as () of float32 at least.

    >>> tensor_beside(torch.zeros(3, dtype=torch.float16), 0.1)
    tensor(0.1000)
    """
    if isinstance(value, Tensor):
        return value
    # unlike torch.tensor, no copy from the host
    return torch.full((), value, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def setting_beside(x: Tensor, value: Tensor | float, name: str, caller: str) -> Tensor:
    """Return `tensor_beside` of a setting for the backward, which must broadcast to x."""
    setting = tensor_beside(x, value)
    if not broadcasts(setting.shape, x.shape):
        raise ValueError(
            f"{caller}: {name} must broadcast to x, got shapes {tuple(setting.shape)} and {tuple(x.shape)}"
        )
    return setting


def broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Return True if this shape expands to the target without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in float32, or in float64 if the first one is."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)  # in bfloat16 levels of 8 bits fall together
    return tuple(tensor.to(wide) for tensor in tensors)


def as_dtype(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return y in this dtype; y itself if it has it already."""
    # Not `y.to(dtype)` alone: where that changes nothing and ends a Function's forward, torch 2.11's compiler takes the
    # output for an alias and the gradients become zero without a word.
    return y if y.dtype == dtype else y.to(dtype)


def sum_to_shape(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient over the axes along which a parameter was broadcast."""
    return grad.sum_to_size(shape) if len(shape) else grad.sum()


def scaled(grad: Tensor | None, factor: float, parameter: Tensor) -> Tensor | None:
    """Scale a kernel's gradient, in the parameter's shape and type; None stays None."""
    return None if grad is None else grad.mul(factor).reshape(parameter.shape).to(parameter.dtype)


def overwrite(parameter: Tensor, values: Tensor) -> None:
    """Write values into a parameter without autograd noticing."""
    # So that a quantizer may run twice in one forward.
    target = parameter if torch.compiler.is_compiling() else parameter.data
    target.copy_(values)


class PositiveScaleFunction(STEFunction):
    """Read a learned scale as a positive, finite number.

    Forward:    y = min(max(scale, smallest), 1e18); NaN is read as smallest
    Backward:   dy/dscale = 1, but 0 where scale < smallest and a step against the gradient would lower it further

    So a scale that was driven below comes back as soon as the loss asks for more, and does not run away meanwhile.
    """

    @staticmethod
    def forward(scale: Tensor, smallest: Tensor) -> Tensor:
        largest = min(LARGEST_SCALE, torch.finfo(scale.dtype).max)
        return torch.where(scale >= smallest, scale, smallest).clamp(max=largest)  # the comparison is false for NaN

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        scale, smallest = ctx.saved_tensors
        return torch.where((scale < smallest) & (grad > 0), 0, grad), None  # a step goes against the gradient


def positive_scale(scale: Tensor, smallest: Tensor | None = None) -> Tensor:
    """Return the positive finite number that a learned scale acts as.

    See `PositiveScaleFunction`. smallest is what it acts as at least, > 0, broadcastable to scale; default 1e-12.

    >>> positive_scale(torch.tensor([0.5, -3.0, float("nan")]), torch.tensor(0.25)).tolist()
    [0.5, 0.25, 0.25]
    """
    if smallest is None:
        smallest = scale.new_tensor(max(SMALLEST_SCALE, torch.finfo(scale.dtype).tiny))
    return apply(PositiveScaleFunction, scale, smallest.to(scale.dtype))


class ScaleGradientFunction(STEFunction):
    """Identity with a smaller or larger gradient: y = x, dy/dx = factor."""

    @staticmethod
    def forward(x: Tensor, factor: Tensor) -> Tensor:
        return x.clone()  # a Function that returns its own input confuses torch 2.11's compiler

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return (grad * factor).to(grad.dtype), None


def scale_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """Return x with its gradient multiplied by factor, as LSQ slows down a scale.

    x is copied, so it had better be small; factor is a number, or a tensor that broadcasts to x and gets no gradient.

    Source: Esser et al., arXiv:1902.08153, section 2.2.

    >>> scale = torch.tensor(0.5, requires_grad=True)
    >>> scale_gradient(scale, 0.1).backward()
    >>> scale.grad
    tensor(0.1000)
    """
    factor = factor.detach() if isinstance(factor, Tensor) else x.new_full((), factor)
    return apply(ScaleGradientFunction, x, factor)
