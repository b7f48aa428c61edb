"""Rows of the proof matrix for the primitives: roundings, clamps, signs, EWGS, soft rounding, the positive scale."""

import functools

import numpy as np
import torch
from torch import Tensor

from qat.functional.clamping import clamp_ste
from qat.functional.ewgs import ewgs_gradient, ewgs_round
from qat.functional.rounding import (
    StochasticRoundSTEFunction,
    ceil_ste,
    floor_ste,
    round_ste,
    stochastic_round_ste,
    trunc_ste,
)
from qat.functional.sign import error_decay_sign, sign_ste, ternary_sign_ste
from qat.functional.soft import dsq_round, soft_round
from qat.functional.tensors import apply, positive_scale
from tests.references import reference_primitives as ref
from tests.references.estimator_case import Array, Case
from tests.references.surrogates import clip, straight_through, tensor

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
        Case(
            "stochastic_round_ste, noise given", stochastic_at, (x,), torch.clone,
            reference=lambda x: ref.STOCHASTIC_ROUND.forward(x, np.float64(0.3125)),
            reference_gradient=ref.ROUND.backward, excused=shared,
        ),
    ]  # fmt: skip


def rounding_cases() -> list[Case]:
    x = tensor(ANY, 4, 6)
    rules = ((round_ste, ref.ROUND), (floor_ste, ref.FLOOR), (ceil_ste, ref.CEIL), (trunc_ste, ref.TRUNC))
    cases = [
        Case(
            function.__name__, function, (x,), torch.clone,
            reference=rule.forward, reference_gradient=rule.backward,
            excused={"levels": UNBOUNDED, "outside": NO_RANGE},
        )
        for function, rule in rules
    ]  # fmt: skip
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
        straight = gradient == "straight_through"
        rule = ref.clamp(straight)
        excused = {"levels": CONTINUOUS} | ({"outside": NO_RANGE} if straight else {})
        function = functools.partial(clamp_ste, gradient=gradient)
        cases.append(Case(
            f"clamp_ste, tensor bounds, {gradient}", function, (x, *tensors), surrogate,
            reference=rule.forward, reference_gradient=rule.backward, broadcast=(1, 2),
            excused=excused,
        ))  # fmt: skip
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
        rule = ref.sign(gradient)
        cases.append(Case(
            f"sign_ste, {gradient}", functools.partial(sign_ste, gradient=gradient), (x,), surrogate,
            reference=rule.forward, reference_gradient=rule.backward, levels=2,
            excused={"zero": TWO_LEVELS} | excused,
        ))  # fmt: skip
        if gradient != "approximate":
            rule = ref.ternary_sign(gradient)
            ternary.append(Case(
                f"ternary_sign_ste, {gradient}", functools.partial(ternary_sign_ste, gradient=gradient),
                (x, tensor(0.5)), lambda x, threshold, call=surrogate: call(x),
                reference=rule.forward, reference_gradient=rule.backward, broadcast=(1,), levels=3, excused=excused,
            ))  # fmt: skip
    for progress in (0.0, 0.37, 0.5, 1.0):
        cases.append(Case(
            f"error_decay_sign, progress {progress}", error_decay_sign, (x, tensor(progress)),
            error_decay_surrogate,
            reference=ref.ERROR_DECAY_SIGN.forward, reference_gradient=ref.ERROR_DECAY_SIGN.backward, levels=2,
            excused={"zero": TWO_LEVELS, "outside": "the published gradient fades, but has no edge"},
        ))  # fmt: skip
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
        Case(
            "ewgs_round, tensor delta", ewgs_round, (x, tensor(0.2)), gradient=ewgs_round_gradient,
            reference=ref.EWGS_ROUND.forward, reference_gradient=ref.EWGS_ROUND.backward, broadcast=(1,),
            excused=excused,
        ),
        Case(
            "ewgs_round, float delta", lambda x: ewgs_round(x, 0.2), (x,),
            gradient=lambda grad, x: ewgs_round_gradient(grad, x, tensor(0.2))[:1],
            reference=lambda x: ref.EWGS_ROUND.forward(x, np.float64(0.2)),
            reference_gradient=lambda grad, x: ref.EWGS_ROUND.backward(grad, x, np.float64(0.2))[:1], excused=excused,
        ),
        Case(
            "ewgs_gradient", ewgs_gradient, (x, tensor(0.25), tensor(0.2)), gradient=ewgs_gradient_gradient,
            reference=ref.EWGS_GRADIENT.forward, reference_gradient=ref.EWGS_GRADIENT.backward, broadcast=(1, 2),
            excused={"levels": CONTINUOUS, "outside": NO_RANGE},
        ),
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
        Case(
            f"soft_round, temperature {temperature}", soft_round, (x, tensor(temperature)), soft_round_surrogate,
            reference=ref.SOFT_ROUND.forward, reference_gradient=ref.SOFT_ROUND.backward, broadcast=(1,),
            excused={
                "idempotent": "a soft step moves towards its level and does not reach it",
                "levels": CONTINUOUS,
                "outside": NO_RANGE,
            },
        )
        for temperature in (0.5, 4.0, 30.0)
    ]  # fmt: skip
    dsq = [
        Case(
            f"dsq_round, alpha {alpha}", dsq_round, (x, tensor(alpha)), dsq_surrogate,
            reference=ref.DSQ_ROUND.forward, reference_gradient=ref.DSQ_ROUND.backward, broadcast=(1,),
            excused={"levels": UNBOUNDED, "outside": NO_RANGE},
        )
        for alpha in (0.2, 0.5)
    ]  # fmt: skip
    return soft + dsq


def positive_scale_cases() -> list[Case]:
    scales = tensor((-9.0, -0.0, 0.0, 1e-9, 0.1, 0.2499999, 0.25, 0.2500001, 0.5, 3.0, 1e4, 6e4), 3, 4)
    return [
        Case(
            "positive_scale", positive_scale, (scales, tensor(0.25)), gradient=positive_scale_gradient,
            reference=ref.POSITIVE_SCALE.forward, reference_gradient=ref.POSITIVE_SCALE.backward, broadcast=(1,),
            excused={
                "zero": NO_OWN_ZERO,
                "levels": CONTINUOUS,
                "outside": "below the floor a gradient that raises the scale passes",
                "nan_inf": "its purpose is to read NaN as the smallest scale",
            },
        )
    ]  # fmt: skip


CASES = [
    *rounding_cases(), *clamp_cases(), *sign_cases(), *positive_scale_cases(), *ewgs_cases(), *soft_cases(),
]  # fmt: skip
