"""`Estimator`, the subject of every check, and inputs of other shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qat.testing.report import require_close, uneven

Gradients = tuple[Tensor | None, ...]
Inputs = tuple[Tensor, ...]

LEADING = (2, 3, 2, 2)  # lengths of the axes that `with_axes` adds
COPIES = 3  # samples of a batch under vmap


@dataclass(frozen=True)
class Estimator:
    """Function with the gradient that it declares: the arguments of `ste_gradcheck`."""

    function: Callable[..., Any]
    surrogate: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    broadcast: tuple[int, ...] = ()
    elementwise: bool = True
    backend: Any = "aot_eager"
    rtol: float = 1e-8
    atol: float = 1e-10

    def output(self, inputs: Inputs) -> Tensor:
        """Return the function's value, without a graph."""
        with torch.no_grad():
            result: Tensor = self.function(*(tensor.detach() for tensor in inputs))
        return result

    def gradients(self, inputs: Inputs, cotangent: Tensor | None = None) -> tuple[Tensor, Gradients]:
        """Return the function's value and the gradients of all slots."""
        leaves = as_leaves(inputs)
        y = self.function(*leaves)
        cotangent = uneven(y).to(y.dtype) if cotangent is None else cotangent
        return y.detach(), pull_back(y, leaves, cotangent)

    def declared_gradients(self, inputs: Inputs, cotangent: Tensor) -> Gradients:
        """Return the gradients that the function's backward claims to be."""
        return self._declared(as_leaves(inputs), cotangent, create_graph=False)

    def second_order(self, inputs: Inputs, cotangent: Tensor) -> list[tuple[Tensor, ...]]:
        """Differentiate each gradient again, by every input and the cotangent."""
        leaves, cotangent = as_leaves(inputs), cotangent.detach().requires_grad_()
        # Each gradient is summed with uneven weights first, which keeps it one backward a slot.
        first = pull_back(self.function(*leaves), leaves, cotangent, create_graph=True)
        return _differentiated(first, (*leaves, cotangent))

    def declared_second_order(self, inputs: Inputs, cotangent: Tensor) -> list[tuple[Tensor, ...]]:
        """Return `second_order` of the declared gradients."""
        leaves, cotangent = as_leaves(inputs), cotangent.detach().requires_grad_()
        return _differentiated(self._declared(leaves, cotangent, create_graph=True), (*leaves, cotangent))

    def declared_tangent(self, inputs: Inputs, tangents: Sequence[Tensor | None]) -> Tensor:
        """Return the declared tangent of the output."""
        # The transpose of the declared gradients, at a cotangent of zero: they are linear in it.
        leaves, cotangent = as_leaves(inputs), torch.zeros_like(self.output(inputs)).requires_grad_()
        pulled = self._declared(leaves, cotangent, create_graph=True)
        terms = [(g * t).sum() for g, t in zip(pulled, tangents, strict=True) if g is not None and t is not None]
        total = sum(terms, start=torch.zeros((), dtype=torch.float64))
        (tangent,) = pull_back(total, [cotangent], torch.ones_like(total))
        return torch.zeros_like(cotangent) if tangent is None else tangent

    def require_close(self, what: str, got: Tensor, expected: Tensor, x: Tensor | None = None) -> None:
        """Raise if two tensors differ by more than this estimator's tolerances."""
        require_close(what, got, expected, self.rtol, self.atol, x)

    def require_same_gradients(self, what: str, got: Gradients, expected: Gradients, inputs: Inputs) -> None:
        """Compare the gradients of all slots; None counts as zero."""
        for slot, pair in enumerate(zip(filled(got, inputs), filled(expected, inputs), strict=True)):
            self.require_close(f"{what}gradient of slot {slot}", *pair, inputs[0])

    def _declared(self, leaves: list[Tensor], cotangent: Tensor, create_graph: bool) -> Gradients:
        if self.surrogate is not None:
            return pull_back(self.surrogate(*leaves), leaves, cotangent, create_graph)
        assert self.gradient is not None
        found = self.gradient(cotangent, *leaves)
        if not isinstance(found, tuple) or len(found) != len(leaves):
            kind = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
            raise ValueError(
                f"ste_gradcheck: gradient must return a tuple with one gradient or None for each of the {len(leaves)} "
                f"inputs, got {kind}"
            )
        return tuple(_fitted(each, leaf, slot) for slot, (each, leaf) in enumerate(zip(found, leaves, strict=True)))


def as_leaves(inputs: Sequence[Tensor], wanted: Sequence[bool] | None = None) -> list[Tensor]:
    """Return leaves of a new graph on the same memory, strides included."""
    wanted = [True] * len(inputs) if wanted is None else wanted
    return [tensor.detach().requires_grad_(asks) for tensor, asks in zip(inputs, wanted, strict=True)]


def pull_back(y: Tensor, leaves: Sequence[Tensor], cotangent: Tensor, create_graph: bool = False) -> Gradients:
    """Return the gradient of every leaf; None if it has or requires none."""
    asking = [leaf for leaf in leaves if leaf.requires_grad]
    if not asking or not y.requires_grad:
        return (None,) * len(leaves)
    found = iter(torch.autograd.grad(y, asking, cotangent, create_graph=create_graph, allow_unused=True))
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


def filled(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients, with zeros in place of None."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in pairs)


def _differentiated(first: Gradients, by: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    rows = []
    for slot, gradient in enumerate(first):
        found: Gradients = (None,) * len(by)
        if gradient is not None and gradient.requires_grad:
            total = (gradient * uneven(gradient, seed=slot + 1)).sum()
            found = torch.autograd.grad(total, by, allow_unused=True, retain_graph=True)
        rows.append(filled(found, by))
    return rows


def _fitted(gradient: Tensor | None, leaf: Tensor, slot: int) -> Tensor | None:
    if gradient is None:
        return None
    if gradient.shape == leaf.shape:
        return gradient.to(leaf.dtype)
    try:
        return gradient.to(leaf.dtype).sum_to_size(leaf.shape)
    except RuntimeError:  # torch's own text names no slot
        raise ValueError(
            f"ste_gradcheck: gradient returns shape {tuple(gradient.shape)} for slot {slot}, which has shape "
            f"{tuple(leaf.shape)}"
        ) from None


def with_axes(estimator: Estimator, x: Tensor, axes: int) -> Tensor:
    """Repeat x along new leading axes, up to `axes` axes, for elementwise functions."""
    if not estimator.elementwise or x.ndim >= axes:
        return x
    return x.expand(*LEADING[: axes - x.ndim], *x.shape).contiguous()


def parameter_shapes(x: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every shape, in words too, in which a parameter broadcasts against x."""
    yield "()", ()
    yield "(1,)", (1,)
    for axis, channels in enumerate(x.shape):
        short = (channels,) + (1,) * (x.ndim - axis - 1)
        yield f"{short}", short
        if axis:
            yield f"{(1,) * axis + short}", (1,) * axis + short


def per_channel(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the parameter's first value in this shape, different in each channel."""
    first = parameter.detach().flatten()[0]
    factors = 1 + torch.arange(torch.Size(shape).numel(), dtype=torch.float64) % 8 / 8  # 1, 9/8 .. 15/8
    return (first * factors).reshape(shape)


def batches(inputs: Inputs) -> Inputs:
    """Stack COPIES different versions of each input along a new first axis."""
    # x with its values in another order, parameters times 1 + k/8.
    x = torch.stack([inputs[0].detach().flatten().roll(k).reshape(inputs[0].shape) for k in range(COPIES)])
    return x, *(torch.stack([p.detach() * (1 + k / 8) for k in range(COPIES)]) for p in inputs[1:])


def without_elements(estimator: Estimator, inputs: Inputs) -> Inputs:
    """Return x with no element, and parameters that still broadcast against it."""
    x, parameters = inputs[0], inputs[1:]
    if estimator.elementwise:
        return x.new_empty((0, *x.shape)), *parameters
    for axis in range(x.ndim):  # the first axis along which no parameter has channels
        back = axis - x.ndim
        if all(p.ndim < -back or p.shape[back] == 1 for p in parameters):
            return x.new_empty((*x.shape[:axis], 0, *x.shape[axis + 1 :])), *parameters
    single = tuple(p.flatten()[0] if slot in estimator.broadcast else p for slot, p in enumerate(parameters, start=1))
    return x.new_empty((0, *x.shape[1:])), *single
