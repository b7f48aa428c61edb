"""When two computations of one step agree: tensors compared, with what tiny noise would have changed held against it.

A value next to the middle between two levels falls on either with the last digit of a sum, and what follows differs
by a level. So where two results differ, the reference is run again with noise of a millionth at every quantizer and
norm, in the forward and in the backward. What differs much more than these runs among themselves is another function;
and since that shows with every data, a verdict takes several draws of them.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qat.quantizer import Quantizer

Results = dict[str, Tensor]

NOISE = 1e-6
"""Relative to a value and to the root mean square of its tensor: well above what the order of sums changes."""

TOLERANCE, TOLERANCE_OF_SCALES = 2e-5, 1e-3
"""Of a tensor's norm. A scale's gradient is a sum of many terms that cancel."""

ALLOWANCE = 10.0
"""How many times what noise changes may be a rounding's doing."""

LEAST, SHARE = 1e-3, 0.05
"""Norms below which a tensor is nothing, of any tensor, and of a gradient as a share of the largest gradient's."""


def distance(expected: Tensor, found: Tensor, least: float = LEAST) -> float:
    """The norm of the difference over that of the expected, at least `least`; NaN in the same places is equal."""
    if expected.shape != found.shape:
        return math.inf
    a, b = expected.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, a - b).norm() / a.nan_to_num(0.0, 0.0, 0.0).norm().clamp(min=least)
    return math.inf if gap.isnan() else float(gap)


def least_norms(expected: Results) -> dict[str, float]:
    """What counts as nothing: a bias before a norm has no gradient but the rounding errors of larger ones."""
    gradients = [name for name in expected if name.startswith("gradient") and not name.endswith("scale")]
    largest = max((float(expected[name].double().norm()) for name in gradients), default=0.0)
    share = SHARE * largest if math.isfinite(largest) else 0.0
    return {name: max(LEAST, share if name.startswith("gradient") else 0.0) for name in expected}


def tolerance(name: str) -> float:
    """What two ways to add up may differ by."""
    return TOLERANCE_OF_SCALES if name.endswith("scale") else TOLERANCE


def differing(expected: Results, found: Results) -> dict[str, float]:
    """The tensors that differ by more than float's last digits, and by how much; first those that only one side has."""
    least, both = least_norms(expected), expected.keys() & found.keys()
    gaps = {name: distance(expected[name], found[name], least[name]) for name in sorted(both)}
    missing = dict.fromkeys(sorted(expected.keys() ^ found.keys()), math.inf)
    return missing | {name: gap for name, gap in gaps.items() if gap > tolerance(name)}


def beyond_noise(expected: Results, found: Results, noisy: Sequence[Results]) -> dict[str, float]:
    """Those of the differing tensors whose difference noise does not explain."""
    least, beyond = least_norms(expected), {}
    for name, gap in differing(expected, found).items():
        runs = [run[name] for run in noisy if name in run and name in expected]
        explained = max((distance(expected[name], run, least[name]) for run in runs), default=0.0)
        if gap > tolerance(name) + ALLOWANCE * explained:
            beyond[name] = gap
    return beyond


def nudged(x: Tensor) -> Tensor:
    """x with noise."""
    size = x.abs() + x.square().mean().sqrt() if x.numel() else x
    return x + NOISE * size * torch.randn(x.shape, dtype=x.dtype, generator=_generator)


_generator = torch.Generator()


@contextlib.contextmanager
def noise(model: nn.Module, seed: int) -> Iterator[None]:
    """A context in which what quantizers and norms are given, and its gradient, are a little off."""
    _generator.manual_seed(seed)

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not args:
            return args
        x = nudged(args[0])
        if x.requires_grad:
            x.register_hook(nudged)
        return x, *args[1:]

    watched = [module for module in model.modules() if isinstance(module, (Quantizer, _BatchNorm))]
    hooks = [module.register_forward_pre_hook(before) for module in watched]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
