"""Rows of the proof matrix for the primitives (roundings, clamps, signs, EWGS, soft rounding, the positive scale) and
the uniform rules (LSQ, LSQ+, PACT, learned bits, power-of-two scales).
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qat.functional import rounding
from qat.functional.clamping import clamp_ste
from qat.functional.ewgs import ewgs_gradient, ewgs_round
from qat.functional.learned_bits import learned_bits_quantize
from qat.functional.lsq import fake_quantize, lsq_plus_quantize, lsq_quantize
from qat.functional.pact import pact_quantize
from qat.functional.power_of_two import power_of_two_scale
from qat.functional.rounding import StochasticRoundSTEFunction, stochastic_round_ste
from qat.functional.sign import error_decay_sign, sign_ste, ternary_sign_ste
from qat.functional.soft import dsq_round, soft_round
from qat.functional.tensors import apply, positive_scale
from tests.references import reference as ref
from tests.references.estimator_case import Array, Case, clip, straight_through, tensor

UNBOUNDED = "the levels are all integers: there is no range"
CONTINUOUS = "the rule has no levels: it is continuous"
NO_RANGE = "the published gradient reaches every x: there is no outside"
TWO_LEVELS = "two levels, none of them 0: zero counts as positive"
NO_OWN_ZERO = "a scale is positive: 0 is read as the smallest scale"


ANY = (-20.0, -3.5, -2.5, -2.0, -1.75, -1.5, -1.25, -1.0, -0.75, -0.5, -0.3, -0.0)
ANY += (0.0, 0.25, 0.5, 0.7, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.5, 20.0)
AROUND_ONE = (-9.0, -1.5, -1.25, -1.0000001, -1.0, -0.9999999, -0.75, -0.5000001, -0.5, -0.25, -1e-9, -0.0)
AROUND_ONE += (0.0, 1e-9, 0.25, 0.5, 0.5000001, 0.75, 0.9999999, 1.0, 1.0000001, 1.25, 1.5, 9.0)


def stochastic_seeded(x: Tensor) -> Tensor:
    """Each call draws the same noise, so that calls can be compared. Meta tensors need no generator."""
    return stochastic_round_ste(x, None if x.is_meta else torch.Generator(x.device).manual_seed(0))


def stochastic_reference(x: Array) -> Array:
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ref.STOCHASTIC_ROUND.forward(x, noise.numpy())


def stochastic_at(x: Tensor, noise: float = 0.3125) -> Tensor:
    """The Function of `stochastic_round_ste` with the same noise for every element."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return apply(StochasticRoundSTEFunction, x, torch.full((), noise, dtype=wide, device=x.device))


def stochastic_cases(x: Tensor) -> list[Case]:
    shared = {"levels": UNBOUNDED, "outside": NO_RANGE}
    return [
        Case(
            "stochastic_round_ste", stochastic_seeded, (x,), torch.clone,
            reference=stochastic_reference, reference_gradient=ref.ROUND.backward,
            excused=shared | {
                "monotone": "every element has noise of its own: the larger of two numbers may be rounded down",
                "dtypes": "the noise is drawn in the type of the arithmetic: another type, another draw",
                "compile": "torch's compiler takes no random generator; without one no two draws are the same",
            },
        ),
        Case("stochastic_round_ste, noise given", stochastic_at, (x,), torch.clone,
             reference=lambda x: ref.STOCHASTIC_ROUND.forward(x, np.float64(0.3125)),
             reference_gradient=ref.ROUND.backward, excused=shared),
    ]  # fmt: skip


def rounding_cases() -> list[Case]:
    x, excused = tensor(ANY, 4, 6), {"levels": UNBOUNDED, "outside": NO_RANGE}
    rules = {"round_ste": ref.ROUND, "floor_ste": ref.FLOOR, "ceil_ste": ref.CEIL, "trunc_ste": ref.TRUNC}
    cases = [
        Case(name, getattr(rounding, name), (x,), torch.clone, rule=rule, excused=excused)
        for name, rule in rules.items()
    ]
    return cases + stochastic_cases(x)


def clamp_straight_surrogate(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x gets the whole gradient; a bound gets the gradient of the values that it clamps."""
    held = torch.where(x < low, low, torch.where(x > high, high, 0.0))
    return straight_through(clip(x, low, high), x) + held - held.detach()


def clamp_cases() -> list[Case]:
    x, bounds = tensor((-20.0, -2.0, -1.75, -1.5000001, *ANY[4:-4], 1.9, 2.0, 2.0000001, 3.0), 4, 6), (-1.5, 2.0)
    tensors = tuple(tensor(bound) for bound in bounds)
    cases = []
    for gradient, surrogate in (("clipped", clip), ("straight_through", clamp_straight_surrogate)):
        straight, function = gradient == "straight_through", partial(clamp_ste, gradient=gradient)
        rule, excused = ref.clamp(straight), {"levels": CONTINUOUS} | ({"outside": NO_RANGE} if straight else {})
        cases.append(Case(f"clamp_ste, tensor bounds, {gradient}", function, (x, *tensors), surrogate,
                          rule=rule, broadcast=(1, 2), excused=excused))  # fmt: skip
        cases.append(Case(
            f"clamp_ste, float bounds, {gradient}", lambda x, call=function: call(x, *bounds), (x,),
            lambda x, call=surrogate: call(x, *tensors),
            reference=lambda x, rule=rule: rule.forward(x, *map(np.float64, bounds)),
            reference_gradient=lambda grad, x, rule=rule: rule.backward(grad, x, *map(np.float64, bounds))[:1],
            excused=excused,
        ))  # fmt: skip
    return cases


SIGN_SURROGATES = {
    "clipped": lambda x: torch.where(x.abs() <= 1, x, 0.0),
    "straight_through": torch.clone,
    "approximate": lambda x: torch.where(x.abs() <= 1, 2 * x - x * x.abs(), 0.0),
}


def sign_cases() -> list[Case]:
    x, cases, ternary = tensor(AROUND_ONE, 4, 6), [], []
    for gradient, surrogate in SIGN_SURROGATES.items():
        excused = {"outside": NO_RANGE} if gradient == "straight_through" else {}
        cases.append(Case(f"sign_ste, {gradient}", partial(sign_ste, gradient=gradient), (x,), surrogate,
                          rule=ref.sign(gradient), levels=2, excused={"zero": TWO_LEVELS} | excused))  # fmt: skip
        if gradient != "approximate":
            ternary.append(Case(f"ternary_sign_ste, {gradient}", partial(ternary_sign_ste, gradient=gradient),
                                (x, tensor(0.5)), lambda x, threshold, call=surrogate: call(x), excused=excused,
                                rule=ref.ternary_sign(gradient), broadcast=(1,), levels=3))  # fmt: skip
    for progress in (0.0, 0.37, 0.5, 1.0):
        cases.append(Case(f"error_decay_sign, progress {progress}", error_decay_sign, (x, tensor(progress)),
                          error_decay_surrogate, rule=ref.ERROR_DECAY_SIGN, levels=2,
                          excused={"zero": TWO_LEVELS,
                                   "outside": "the published gradient fades, but has no edge"}))  # fmt: skip
    return cases + ternary


def error_decay_surrogate(x: Tensor, progress: Tensor) -> Tensor:
    t = 0.1 * 10 ** (2 * progress.detach())
    return torch.clamp(1 / t, min=1.0) * torch.tanh(t * x)


def positive_scale_gradient(grad: Tensor, scale: Tensor, smallest: Tensor) -> tuple[Tensor, None]:
    return torch.where((scale < smallest) & (grad > 0), 0.0, grad), None


def ewgs_round_gradient(grad: Tensor, x: Tensor, delta: Tensor) -> tuple[Tensor, None]:
    """The sign and the residual are constants."""
    return grad * (1 + delta.detach() * (torch.sign(grad) * (x - torch.round(x))).detach()), None


def ewgs_gradient_gradient(grad: Tensor, x: Tensor, scale: Tensor, delta: Tensor) -> tuple[Tensor, None, None]:
    return *ewgs_round_gradient(grad, x / scale, delta), None


def ewgs_cases() -> list[Case]:
    x, excused = tensor(ANY, 4, 6), {"levels": UNBOUNDED, "outside": NO_RANGE}
    return [
        Case("ewgs_round, tensor delta", ewgs_round, (x, tensor(0.2)), gradient=ewgs_round_gradient,
             rule=ref.EWGS_ROUND, broadcast=(1,), excused=excused),
        Case("ewgs_round, float delta", lambda x: ewgs_round(x, 0.2), (x,),
             gradient=lambda grad, x: ewgs_round_gradient(grad, x, tensor(0.2))[:1],
             reference=lambda x: ref.EWGS_ROUND.forward(x, np.float64(0.2)),
             reference_gradient=lambda grad, x: ref.EWGS_ROUND.backward(grad, x, np.float64(0.2))[:1], excused=excused),
        Case("ewgs_gradient", ewgs_gradient, (x, tensor(0.25), tensor(0.2)), gradient=ewgs_gradient_gradient,
             rule=ref.EWGS_GRADIENT, broadcast=(1, 2), excused={"levels": CONTINUOUS, "outside": NO_RANGE}),
    ]  # fmt: skip


def soft_round_surrogate(x: Tensor, temperature: Tensor) -> Tensor:
    """The rule itself: it is differentiable."""
    low, high = torch.sigmoid(-temperature / 2), torch.sigmoid(temperature / 2)
    step = torch.sigmoid(temperature * (x - torch.floor(x) - 0.5))
    return torch.floor(x) + (step - low) / (high - low)


def dsq_surrogate(x: Tensor, alpha: Tensor) -> Tensor:
    k = torch.log(2 / alpha - 1)
    return torch.floor(x) + (torch.tanh(k * (x - torch.floor(x) - 0.5)) / (1 - alpha) + 1) / 2


def soft_cases() -> list[Case]:
    x = tensor(ANY, 4, 6)
    soft = [
        Case(f"soft_round, temperature {temperature}", soft_round, (x, tensor(temperature)), soft_round_surrogate,
             rule=ref.SOFT_ROUND, broadcast=(1,),
             excused={"idempotent": "a soft step moves towards its level and does not reach it", "levels": CONTINUOUS,
                      "outside": NO_RANGE})
        for temperature in (0.5, 4.0, 30.0)
    ]  # fmt: skip
    dsq = [
        Case(f"dsq_round, alpha {alpha}", dsq_round, (x, tensor(alpha)), dsq_surrogate, rule=ref.DSQ_ROUND,
             broadcast=(1,), excused={"levels": UNBOUNDED, "outside": NO_RANGE})
        for alpha in (0.2, 0.5)
    ]  # fmt: skip
    return soft + dsq


def positive_scale_cases() -> list[Case]:
    scales = tensor((-9.0, -0.0, 0.0, 1e-9, 0.1, 0.2499999, 0.25, 0.2500001, 0.5, 3.0, 1e4, 6e4), 3, 4)
    return [
        Case("positive_scale", positive_scale, (scales, tensor(0.25)), gradient=positive_scale_gradient,
             rule=ref.POSITIVE_SCALE, broadcast=(1,),
             excused={"zero": NO_OWN_ZERO, "levels": CONTINUOUS,
                      "outside": "below the floor a gradient that raises the scale passes",
                      "nan_inf": "its purpose is to read NaN as the smallest scale"}),
    ]  # fmt: skip


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
    return [
        Case(f"lsq_quantize, grad_factor {factor:g}", partial(lsq_quantize, qmin=-8, qmax=7, grad_factor=factor),
             (STEP * tensor(SIGNED_V, 4, 6), tensor(STEP)), partial(lsq_surrogate, grad_factor=factor),
             rule=ref.lsq(-8, 7, factor), broadcast=(1,), levels=16)
        for factor in (1.0, 0.125)
    ]  # fmt: skip


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
        grid, rule = {"qmin": qmin, "qmax": qmax}, ref.lsq_plus(qmin, qmax, factor)
        x = affine_points(float(ref.integer_zero(np.float64(zero_point), qmin, qmax)), qmin, qmax)
        proof = (
            {"surrogate": partial(lsq_plus_surrogate, **grid)}
            if factor == 1
            else {"gradient": partial(lsq_plus_gradient, factor=factor, **grid)}
        )
        cases.append(Case(f"lsq_plus_quantize, {qmin}..{qmax}, zero point {zero_point:g}, grad_factor {factor:g}",
                          partial(lsq_plus_quantize, grad_factor=factor, **grid),
                          (x, tensor(STEP), tensor(zero_point)), **proof, rule=rule, broadcast=(1, 2),
                          levels=16))  # fmt: skip
    return cases


def fake_quantize_cases() -> list[Case]:
    """The grid of LSQ+ where only x gets a gradient."""
    grid, rule = {"qmin": 0, "qmax": 15}, ref.lsq_plus(0, 15)
    return [
        Case("fake_quantize", partial(fake_quantize, **grid),
             (affine_points(3.0, **grid), tensor(STEP), tensor(3.0)),
             lambda x, scale, zero_point: lsq_plus_surrogate(x, scale.detach(), zero_point.detach(), **grid),
             reference=rule.forward, reference_gradient=lambda *arrays: (rule.backward(*arrays)[0], None, None),
             broadcast=(1, 2), levels=16),
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
        cases.append(Case(f"pact_quantize, {bits} bits", partial(pact_quantize, bits=bits),
                          (STEP * tensor(v, 4, 5), tensor(STEP * steps)), pact_surrogate, rule=ref.pact(bits),
                          broadcast=(1,), levels=2**bits))  # fmt: skip
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
        edges = tensor((qmax - 0.5, float(qmax), qmax + 0.25, qmax + 0.5, qmax + 0.75))
        points = STEP * torch.cat([tensor(v), edges, -edges, tensor((0.1, -0.9))])
        cases.append(Case(f"learned_bits_quantize, {'signed' if signed else 'unsigned'}, {bits} bits",
                          partial(learned_bits_quantize, signed=signed),
                          (points.reshape(4, 9), tensor(STEP * qmax), tensor(bits)),
                          partial(learned_bits_surrogate, signed=signed), rule=ref.learned_bits(signed), broadcast=(1,),
                          levels=2 * qmax + 1 if signed else qmax + 1))  # fmt: skip
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
        Case(f"power_of_two_scale, {rounding}", partial(power_of_two_scale, rounding=rounding), (scales,),
             partial(power_of_two_surrogate, rounding=rounding), rule=ref.power_of_two(rounding == "up"),
             excused={"levels": "the levels are all powers of two",
                      "outside": "every positive scale has its power of two: there is no outside"})
        for rounding in ("nearest", "up")
    ]  # fmt: skip


CASES = [
    *rounding_cases(), *clamp_cases(), *sign_cases(), *positive_scale_cases(), *ewgs_cases(), *soft_cases(),
    *lsq_cases(), *lsq_plus_cases(), *fake_quantize_cases(), *pact_cases(),
    *learned_bits_cases(), *power_of_two_cases(),
]  # fmt: skip
