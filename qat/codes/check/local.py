"""Compares one function of a fused graph with its reference, on the same inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat.codes.check.training_step import gap_between, noise
from qat.codes.operators.codes import Codes, PreQuantizer
from qat.codes.operators.grid import shift_of
from qat.codes.operators.quantize import decode
from qat.kernels import passes_values, plain_formulas
from qat.quantizer import Quantizer
from qat.torch_internals import AnyBatchNorm, buffers_of

NEAR = 0.02
"""Distance in steps from a tie or an end within which a value may fall either way."""

TOLERANCE, NEGLIGIBLE = 2e-3, 1e-5
"""Relative tolerance, and absolute tolerance as a share of sum(abs(terms))."""


class ValueAndCodes(NamedTuple):
    """A quantized tensor in a self-check: torch's result, and the codes of this value."""

    value: Tensor
    codes: Codes
    quantizer: Quantizer


@dataclass
class PairedArguments:
    """The same arguments for a function on codes and for its reference."""

    coded: list[object]
    plain: list[object]
    pairs: list[tuple[Tensor, Tensor]]  # whose gradients are compared
    learned: list[Tensor]  # scales that inputs of the model were quantized with

    @classmethod
    def of(cls, args: tuple[object, ...]) -> "PairedArguments":
        """Pair both kinds of arguments, detached from the graph that made them."""
        paired = cls([], [], [], [])
        for given in args:
            coded, plain = paired._pair(given)
            paired.coded.append(coded)
            paired.plain.append(plain)
        return paired

    def _pair(self, given: object) -> tuple[object, object]:
        if isinstance(given, ValueAndCodes) and given.codes.source is not None:
            source, learned = given.codes.source
            self.learned.append(learned.scale)
            with plain_formulas():
                return given.codes, given.quantizer(source.detach())
        if isinstance(given, ValueAndCodes):
            carrier = given.codes.carrier.detach().requires_grad_()
            plain = given.value.detach().requires_grad_()
            self.pairs.append((carrier, plain))
            return Codes(carrier, given.codes.codes, given.codes.qparams), plain
        if isinstance(given, Tensor) and given.is_floating_point():
            coded, plain = (given.detach().requires_grad_(given.requires_grad) for _ in range(2))
            if given.requires_grad:
                self.pairs.append((coded, plain))
            return coded.clone(), plain.clone()  # an activation may write into what it is given
        return given, given


def compare_quantizing(
    function: Callable[..., Codes | Tensor], before: Callable[..., PreQuantizer], args: tuple[object, ...], path: str
) -> str | None:
    """Return what is wrong with a function that quantizes, or None."""
    paired = PairedArguments.of(args)
    quantizer = next(each for each in args if isinstance(each, Quantizer))
    modules = [each for each in args if isinstance(each, nn.Module)]
    with _kept_buffers(modules):  # a BatchNorm moves its running statistics
        found = function(*paired.coded)
    if not isinstance(found, Codes) and not passes_values(found):
        return None
    with _kept_buffers(modules), plain_formulas():
        unclipped, z, bounds = before(*map(_exact, paired.plain))
        y = quantizer(z)
    with torch.no_grad():
        scale, zero_point = quantizer.grid()
        level = z / scale + zero_point
        ties = ((level - level.floor()) - 0.5).abs() < NEAR
        expected = quantizer.codes(z)
        shift = shift_of(quantizer)
        codes = quantizer.codes(found) if isinstance(found, Tensor) else found.codes.to(expected.dtype) - shift
        wrong = (codes != expected) & ~ties & z.isfinite()
    if bool(wrong.any()) or (isinstance(found, Codes) and not torch.isclose(found.qparams[0], scale)):
        return f"{int(wrong.sum())} of {wrong.numel()} codes of {path} differ"
    if isinstance(found, Codes) and found.source is not None:
        return None  # its readers compute the gradient of its scale
    either = ties | _at_edges(quantizer, unclipped, z)
    for bound in bounds:
        either |= (unclipped.detach() - bound).abs() < NEAR * scale.detach()
    carrier = found.carrier if isinstance(found, Codes) else found
    if not carrier.requires_grad:  # an input of the model, on a frozen grid
        return None
    cotangent = torch.where(either, 0.0, noise(y)).to(carrier.dtype)
    low, high = quantizer.bounds()
    slack = cotangent.abs().sum() * quantizer.gradient_factor(z) * (high - low)
    if quantizer.relative_steps:
        slack = slack * scale.detach() ** 2
    return _compare_gradients((carrier, y), cotangent, paired, modules, path, float(slack))


def compare_computing(function: Callable[..., Any], args: tuple[object, ...], path: str) -> str | None:
    """Return what is wrong with a function that computes with codes, or None."""
    paired = PairedArguments.of(args)
    modules = [each for each in args if isinstance(each, nn.Module) and not isinstance(each, Quantizer)]
    with _kept_buffers(modules):
        found = function(*paired.coded)
    with _kept_buffers(modules), plain_formulas():
        y = function(*paired.plain)
    got = decode(found)
    if got.shape != y.shape or got.dtype != y.dtype:
        return f"the result of {path} is {got.dtype} {tuple(got.shape)} instead of {y.dtype} {tuple(y.shape)}"
    if not _alike(got.detach(), y.detach()):
        return f"the result of {path} differs by up to {(got - y).detach().abs().max().item():.3g}"
    if not y.requires_grad:
        return None
    cotangent = noise(y)
    return _compare_gradients((got, y), cotangent, paired, modules, path, float(cotangent.abs().sum()))


def _exact(given: object) -> object:
    if isinstance(given, AnyBatchNorm):  # torch's own loses digits where variances are small
        return partial(_normalised, norm=given)
    if isinstance(given, nn.Module) and not isinstance(given, Quantizer):
        return lambda x: given(x.clone())  # an activation may write into what it is given
    return given


def _normalised(y: Tensor, norm: AnyBatchNorm) -> Tensor:
    axes, shape = [0, *range(2, y.dim())], [1, -1, *[1] * (y.dim() - 2)]
    wide = y.double()
    if norm.training or norm.running_mean is None:
        with torch.no_grad():
            norm(y)  # moves the running statistics
        var, mean = torch.var_mean(wide, axes, correction=0)
    else:
        assert norm.running_var is not None
        mean, var = norm.running_mean.double(), norm.running_var.double()
    z = (wide - mean.view(shape)) * torch.rsqrt(var + norm.eps).view(shape)
    if norm.affine:
        z = z * norm.weight.double().view(shape) + norm.bias.double().view(shape)
    return z.to(y.dtype)


def _compare_gradients(
    results: tuple[Tensor, Tensor],
    cotangent: Tensor,
    paired: PairedArguments,
    modules: list[nn.Module],
    path: str,
    slack: float,
) -> str | None:
    coded, plain = results
    shared: dict[int, Tensor] = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    shared |= {id(scale): scale for scale in paired.learned}
    if not (paired.pairs or shared):  # a frozen scale of an input
        return None
    wanted = ([pair[side] for pair in paired.pairs] + list(shared.values()) for side in (0, 1))
    ours = torch.autograd.grad(coded, next(wanted), cotangent, allow_unused=True)
    with plain_formulas():
        theirs = torch.autograd.grad(plain, next(wanted), cotangent, allow_unused=True)
    size = float(cotangent.norm())
    for got, expected in zip(ours, theirs, strict=True):
        if got is None and expected is None:
            continue
        got = torch.zeros_like(expected) if got is None else got
        expected = torch.zeros_like(got) if expected is None else expected
        least = NEGLIGIBLE * (slack if expected.numel() < 4096 else size)
        gap = gap_between(expected, got, least, TOLERANCE)
        if gap is not None:
            return f"a gradient of {path} {gap}"
    return None


@contextmanager
def _kept_buffers(modules: list[nn.Module]) -> Iterator[None]:
    registered = [(buffers_of(part), dict(buffers_of(part))) for module in modules for part in module.modules()]
    found = [buffer for _, buffers in registered for buffer in buffers.values() if buffer is not None]
    values = [(buffer, buffer.detach().clone()) for buffer in found]
    try:
        yield
    finally:
        for buffers, before in registered:
            buffers.clear()
            buffers.update(before)
        for buffer, value in values:
            buffer.data.copy_(value)


@torch.no_grad()
def _at_edges(quantizer: Quantizer, unclipped: Tensor, z: Tensor) -> Tensor:
    # There the last digit decides whether a value lies on the grid or beyond its end. That changes the gradient of the
    # value before the clip, and that of the scale unless the end stands for 0.
    scale, zero_point = quantizer.grid()
    at_edges = torch.zeros_like(z, dtype=torch.bool)
    for end in quantizer.bounds():
        at_edges |= (unclipped / scale + zero_point - end).abs() < NEAR
        at_edges |= ((z / scale + zero_point - end).abs() < NEAR) & (zero_point != end)
    return at_edges


def _alike(got: Tensor, expected: Tensor) -> bool:
    # Equal up to the order of sums; NaN equals NaN.
    both = got.isnan() & expected.isnan()
    got, expected = got.masked_fill(both, 0.0), expected.masked_fill(both, 0.0)
    if not bool(expected.isfinite().all()):
        return bool(torch.equal(got.isfinite(), expected.isfinite()))
    least = 1e-4 if expected.dtype is torch.float32 else 3e-2
    most = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(((got - expected).abs() <= least * most).all())
