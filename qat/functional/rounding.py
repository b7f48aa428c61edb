"""Roundings with a straight-through gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qat.functional.tensors import STEFunction, apply, as_dtype, require_floating


class PassingFunction(STEFunction):
    """Base of what counts as the identity of its first input; others get no gradient."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass  # the gradient does not depend on the inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class RoundSTEFunction(PassingFunction):
    """y = round(x), dy/dx = 1; `round` is torch.round, floor, ceil or trunc."""

    @staticmethod
    def forward(x: Tensor, round: Callable[[Tensor], Tensor]) -> Tensor:
        return round(x)  # torch.round goes to even, as ONNX does


class StochasticRoundSTEFunction(PassingFunction):
    """y = floor(x) + 1 where noise < x - floor(x), else floor(x); dy/dx = 1.

    The noise is an input: so the same draw serves the forward, a recomputation of it and every derivative.
    """

    @staticmethod
    def forward(x: Tensor, noise: Tensor) -> Tensor:
        wide = x.to(noise.dtype)
        lower = torch.floor(wide)
        # an infinite x has the fraction NaN, for which the comparison is false: it stays infinite
        return as_dtype(lower + (noise < wide - lower), x.dtype)


def round_ste(x: Tensor) -> Tensor:
    """Round to the nearest integer, ties to even; the gradient passes unchanged.

    y = round(x), dy/dx = 1.

    Source: Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons", arXiv:1308.3432.

    >>> x = torch.tensor([0.5, 1.5, -0.4], requires_grad=True)
    >>> y = round_ste(x)
    >>> y.sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.0, 2.0, -0.0], [1.0, 1.0, 1.0])
    """
    return apply(RoundSTEFunction, require_floating(x, "round_ste"), torch.round)


def floor_ste(x: Tensor) -> Tensor:
    """Round down: y = floor(x), dy/dx = 1. Source: arXiv:1308.3432.

    >>> floor_ste(torch.tensor([0.7, 2.0, -0.4])).tolist()
    [0.0, 2.0, -1.0]
    """
    return apply(RoundSTEFunction, require_floating(x, "floor_ste"), torch.floor)


def ceil_ste(x: Tensor) -> Tensor:
    """Round up: y = ceil(x), dy/dx = 1. Source: arXiv:1308.3432.

    >>> ceil_ste(torch.tensor([0.2, 2.0, -1.4])).tolist()
    [1.0, 2.0, -1.0]
    """
    return apply(RoundSTEFunction, require_floating(x, "ceil_ste"), torch.ceil)


def trunc_ste(x: Tensor) -> Tensor:
    """Round towards zero: y = trunc(x), dy/dx = 1. Source: arXiv:1308.3432.

    >>> trunc_ste(torch.tensor([0.7, 2.0, -1.9])).tolist()
    [0.0, 2.0, -1.0]
    """
    return apply(RoundSTEFunction, require_floating(x, "trunc_ste"), torch.trunc)


def stochastic_round_ste(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round up with a probability equal to the fraction, so that the mean is x.

    y = floor(x) + 1 where u < x - floor(x), else floor(x), with u uniform in [0, 1) drawn for every element; dy/dx = 1.
    u is drawn in float32 at least: 2^-24 is then the largest error of the mean, for half-precision x too. Under
    `torch.func.vmap` say randomness="different" (or "same"), as for torch's own random functions. Inside
    `torch.compile(fullgraph=True)` leave the generator out: torch's compiler cannot take one. It is on the device of x.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551.

    >>> x = torch.full((10000,), 0.25, requires_grad=True)
    >>> y = stochastic_round_ste(x, torch.Generator().manual_seed(0))
    >>> y.sum().backward()
    >>> y.unique().tolist(), x.grad.unique().tolist(), abs(y.mean().item() - 0.25) < 0.02
    ([0.0, 1.0], [1.0], True)
    """
    require_floating(x, "stochastic_round_ste")
    wide = torch.promote_types(x.dtype, torch.float32)
    noise = torch.rand(x.shape, generator=generator, dtype=wide, device=x.device)
    return apply(StochasticRoundSTEFunction, x, noise)
