"""Whether two computations of one step agree, judged against the effect of tiny noise.

The last digit of a sum decides to which level a value near a tie is rounded, and everything after it differs by a
level. So where two results differ, the reference runs again with noise of a millionth at every quantizer and norm, in
the forward and the backward. A difference much larger than the effect of the noise is a different function. Such a
difference shows with any data, so a verdict takes several inputs.
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
"""Relative to a value plus the root mean square of its tensor; well above the effect of another order of summation."""

TOLERANCE, TOLERANCE_OF_SCALES = 2e-5, 1e-3
"""Relative to a tensor's norm. A scale's gradient is a sum of many terms that cancel."""

ALLOWANCE = 10.0
"""A difference up to this multiple of the effect of noise may come from rounding."""

LEAST, SHARE = 1e-3, 0.05
"""Smaller norms count as zero: for any tensor, and for a gradient as a share of the largest gradient norm."""


def distance(expected: Tensor, found: Tensor, least: float = LEAST) -> float:
    """The norm of the difference, relative to that of `expected` (at least `least`); NaN equals NaN."""
    if expected.shape != found.shape:
        return math.inf
    a, b = expected.double(), found.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, a - b).norm() / a.nan_to_num(0.0, 0.0, 0.0).norm().clamp(min=least)
    return math.inf if gap.isnan() else float(gap)


def least_norms(expected: Results) -> dict[str, float]:
    """The norm below which each tensor counts as zero: a bias before a norm has only rounding errors as gradient."""
    gradients = [name for name in expected if name.startswith("gradient") and not name.endswith("scale")]
    largest = max((float(expected[name].double().norm()) for name in gradients), default=0.0)
    share = SHARE * largest if math.isfinite(largest) else 0.0
    return {name: max(LEAST, share if name.startswith("gradient") else 0.0) for name in expected}


def tolerance(name: str) -> float:
    """The difference that another order of summation may cause."""
    return TOLERANCE_OF_SCALES if name.endswith("scale") else TOLERANCE


def differing(expected: Results, found: Results) -> dict[str, float]:
    """The tensors that differ beyond float rounding, and by how much; first those that only one side has."""
    least, both = least_norms(expected), expected.keys() & found.keys()
    gaps = {name: distance(expected[name], found[name], least[name]) for name in sorted(both)}
    missing = dict.fromkeys(sorted(expected.keys() ^ found.keys()), math.inf)
    return missing | {name: gap for name, gap in gaps.items() if gap > tolerance(name)}


def beyond_noise(expected: Results, found: Results, noisy: Sequence[Results]) -> dict[str, float]:
    """The differing tensors whose difference noise does not explain."""
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
    """A context that adds noise to the inputs of quantizers and norms, and to the gradients of these inputs."""
    _generator.manual_seed(seed)

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not args:
            return args
        x = nudged(args[0])
        if x.requires_grad:
            x.register_hook(nudged)
        return x, *args[1:]

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, (Quantizer, _BatchNorm)):
                hooks.enter_context(module.register_forward_pre_hook(before))
        yield
