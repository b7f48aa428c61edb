"""Rows of the proof matrix for the uniform rules (LSQ, LSQ+, PACT, learned bits, power-of-two scales); CASES holds
the primitives too.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from qat.functional.learned_bits import learned_bits_quantize
from qat.functional.lsq import fake_quantize, lsq_plus_quantize, lsq_quantize
from qat.functional.pact import pact_quantize
from qat.functional.power_of_two import power_of_two_scale
from tests.references import cases_primitives, reference
from tests.references import reference_primitives as ref
from tests.references.estimator_case import Case
from tests.references.surrogates import straight_through, tensor

# v = x / scale far outside, half a step beyond, a quarter, on the bound, and on ties of both parities.
SIGNED_V = (-20.0, -8.75, -8.5, -8.25, -8.0, -7.75, -7.5, -2.5, -1.5, -0.5, -0.25, -0.0)
SIGNED_V += (0.0, 0.25, 0.5, 1.5, 2.5, 6.5, 6.75, 7.0, 7.25, 7.5, 7.75, 20.0)
UNSIGNED_V = (-20.0, -0.75, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 0.75, 1.5, 2.5, 3.3)
UNSIGNED_V += (6.5, 7.5, 8.4, 13.5, 14.5, 14.75, 15.0, 15.25, 15.5, 15.75, 16.5, 40.0)
STEP = 0.25


def surrogate_of_scale(x: Tensor, scale: Tensor, low: Tensor, high: Tensor, grad_factor: float = 1.0) -> Tensor:
    """Inside the range x plus a constant number of steps, outside the number of steps at the bound (low or high)."""
    v = (x / scale).detach()
    scale = grad_factor * scale + ((1 - grad_factor) * scale).detach()
    inside = x + scale * (torch.round(v) - v)
    return torch.where(v < low, scale * low, torch.where(v > high, scale * high, inside))


def lsq_surrogate(x: Tensor, scale: Tensor, grad_factor: float = 1.0) -> Tensor:
    return surrogate_of_scale(x, scale, tensor(-8.0), tensor(7.0), grad_factor)


def lsq_cases() -> list[Case]:
    x, cases = STEP * tensor(SIGNED_V, 4, 6), []
    for factor in (1.0, 0.125):
        rule = reference.lsq(-8, 7, factor)
        cases.append(Case(
            f"lsq_quantize, grad_factor {factor:g}",
            functools.partial(lsq_quantize, qmin=-8, qmax=7, grad_factor=factor), (x, tensor(STEP)),
            functools.partial(lsq_surrogate, grad_factor=factor),
            reference=rule.forward, reference_gradient=rule.backward, broadcast=(1,), levels=16,
        ))  # fmt: skip
    return cases


def lsq_plus_surrogate(x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int) -> Tensor:
    """The zero point is rounded and clamped to an integer of the grid, straight through."""
    zero = straight_through(torch.clamp(torch.round(zero_point), qmin, qmax), zero_point)
    return surrogate_of_scale(x, scale, qmin - zero, qmax - zero)


def lsq_plus_gradient(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, qmin: int, qmax: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_factor multiplies the first gradient only; a surrogate's scaled parameter would multiply every order."""
    zero = straight_through(torch.clamp(torch.round(zero_point), qmin, qmax), zero_point)
    v = (x / scale).detach()
    below, above = v < qmin - zero, v > qmax - zero
    slope = torch.where(below, qmin - zero, torch.where(above, qmax - zero, torch.round(v) - v))
    to_zero = torch.where(below | above, -scale, 0.0)
    return (
        torch.where(below | above, 0.0, grad),
        factor * (grad * slope).sum_to_size(scale.shape),
        factor * (grad * to_zero).sum_to_size(zero_point.shape),
    )


def affine_points(zero: float, qmin: int, qmax: int) -> Tensor:
    """Around both bounds of the grid, in units of x; ties stay ties because the zero point is an integer."""
    middle = (-2.5, -1.5, -0.5, -0.25, -0.0, 0.0, 0.5, 1.5, 2.5, 3.3)
    near = (-30.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5)
    low, high = (qmin - zero + each for each in near), (qmax - zero - each for each in near)
    return STEP * tensor((*low, *middle, *high), 4, 6)


def lsq_plus_cases() -> list[Case]:
    cases = []
    for zero_point, qmin, qmax, factor in (
        (3.0, 0, 15, 1.0), (2.5, 0, 15, 1.0), (-5.0, -8, 7, 1.0), (-40.0, -8, 7, 1.0), (3.0, 0, 15, 0.125),
    ):  # fmt: skip
        grid, rule = {"qmin": qmin, "qmax": qmax}, reference.lsq_plus(qmin, qmax, factor)
        x = affine_points(float(reference.integer_zero(np.float64(zero_point), qmin, qmax)), qmin, qmax)
        proof = (
            {"surrogate": functools.partial(lsq_plus_surrogate, **grid)}
            if factor == 1
            else {"gradient": functools.partial(lsq_plus_gradient, factor=factor, **grid)}
        )
        cases.append(Case(
            f"lsq_plus_quantize, {qmin}..{qmax}, zero point {zero_point:g}, grad_factor {factor:g}",
            functools.partial(lsq_plus_quantize, grad_factor=factor, **grid),
            (x, tensor(STEP), tensor(zero_point)), **proof,
            reference=rule.forward, reference_gradient=rule.backward, broadcast=(1, 2), levels=16,
        ))  # fmt: skip
    return cases


def fake_quantize_cases() -> list[Case]:
    """The grid of LSQ+ where only x gets a gradient."""
    grid, rule = {"qmin": 0, "qmax": 15}, reference.lsq_plus(0, 15)
    return [
        Case(
            "fake_quantize", functools.partial(fake_quantize, **grid),
            (affine_points(3.0, **grid), tensor(STEP), tensor(3.0)),
            lambda x, scale, zero_point: lsq_plus_surrogate(x, scale.detach(), zero_point.detach(), **grid),
            reference=rule.forward,
            reference_gradient=lambda *arrays: (rule.backward(*arrays)[0], None, None), broadcast=(1, 2), levels=16,
        )
    ]  # fmt: skip


def pact_surrogate(x: Tensor, alpha: Tensor) -> Tensor:
    """The clip; a value exactly at alpha gives both x and alpha a gradient."""
    at_alpha = x + alpha - alpha.detach()
    return torch.where(x < 0, 0.0, torch.where(x > alpha, alpha, torch.where(x == alpha, at_alpha, x)))


def pact_cases() -> list[Case]:
    cases = []
    for bits in (1, 2, 4):
        steps = 2**bits - 1
        middle = (0.0, 0.25, 0.5, 0.9, 1.5, 2.5, 3.5, 6.5)
        v = (-20.0, -0.75, -0.5, -0.25, -0.0, *middle, *(steps + each for each in (-0.5, -0.25, 0.0, 0.25, 0.5)))
        v += (steps + 0.75, steps + 30.0)
        rule = ref.pact(bits)
        cases.append(Case(
            f"pact_quantize, {bits} bits", functools.partial(pact_quantize, bits=bits),
            (STEP * tensor(v, 4, 5), tensor(STEP * steps)), pact_surrogate,
            reference=rule.forward, reference_gradient=rule.backward, broadcast=(1,), levels=2**bits,
        ))  # fmt: skip
    return cases


def learned_bits_surrogate(x: Tensor, reach: Tensor, bits: Tensor, signed: bool) -> Tensor:
    """Inside, the step depends on reach and bits; outside, the output is reach and depends on reach only."""
    whole = straight_through(torch.round(bits), bits)
    qmax = 2 ** (whole - 1) - 1 if signed else 2**whole - 1
    scale = reach / qmax
    v = (x / scale).detach()
    qmax = qmax.detach()
    qmin = -qmax if signed else torch.zeros_like(qmax)
    inside = x + scale * (torch.round(v) - v)
    lowest = -reach if signed else 0 * reach
    return torch.where(v < qmin, lowest, torch.where(v > qmax, reach, inside))


def learned_bits_cases() -> list[Case]:
    cases = []
    for signed, bits, v in ((True, 4.3, SIGNED_V), (True, 3.5, SIGNED_V), (True, 2.0, SIGNED_V),
                            (False, 3.6, UNSIGNED_V), (False, 1.4, UNSIGNED_V)):  # fmt: skip
        whole = round(bits)
        qmax = 2 ** (whole - 1) - 1 if signed else 2**whole - 1
        rule = ref.learned_bits(signed)
        edges = tensor((qmax - 0.5, float(qmax), qmax + 0.25, qmax + 0.5, qmax + 0.75))
        points = STEP * torch.cat([tensor(v), edges, -edges, tensor((0.1, -0.9))])
        cases.append(Case(
            f"learned_bits_quantize, {'signed' if signed else 'unsigned'}, {bits} bits",
            functools.partial(learned_bits_quantize, signed=signed),
            (points.reshape(4, 9), tensor(STEP * qmax), tensor(bits)),
            functools.partial(learned_bits_surrogate, signed=signed),
            reference=rule.forward, reference_gradient=rule.backward, broadcast=(1,),
            levels=2 * qmax + 1 if signed else qmax + 1,
        ))  # fmt: skip
    return cases


def power_of_two_surrogate(scale: Tensor, rounding: str) -> Tensor:
    """Round in the log domain, straight through."""
    log = torch.log2(scale)
    rounded = torch.round(log) if rounding == "nearest" else torch.ceil(log)
    return torch.exp2(straight_through(rounded, log))


def power_of_two_cases() -> list[Case]:
    tie = math.sqrt(0.5)
    scales = tensor(
        (1e-4, 0.0078125, 0.25, 0.2500001, 0.2499999, tie - 1e-9, tie + 1e-9, 1.0, 3.0, 5.7, 8.0, 3e4), 3, 4
    )
    return [
        Case(
            f"power_of_two_scale, {rounding}", functools.partial(power_of_two_scale, rounding=rounding), (scales,),
            functools.partial(power_of_two_surrogate, rounding=rounding),
            reference=ref.power_of_two(rounding == "up").forward,
            reference_gradient=ref.power_of_two(rounding == "up").backward,
            excused={
                "levels": "the levels are all powers of two",
                "outside": "every positive scale has its power of two: there is no outside",
            },
        )
        for rounding in ("nearest", "up")
    ]  # fmt: skip


CASES = [
    *cases_primitives.CASES, *lsq_cases(), *lsq_plus_cases(), *fake_quantize_cases(), *pact_cases(),
    *learned_bits_cases(), *power_of_two_cases(),
]  # fmt: skip
