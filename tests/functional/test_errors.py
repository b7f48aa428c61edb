"""What qat.functional and the settings refuse, by name and value: wrong types, arguments that no rule takes."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Optional

import pytest
import torch
from torch import nn

import qat
import qat.functional as F
from qat.finetuning import EMA, Distillation, Oscillations, QuantNoise
from qat.functional.codebooks.binary import binary_scale
from qat.functional.codebooks.ternary import ternary_scale
from qat.post_training import AdaRound, CrossLayerEqualization, QDrop
from qat.targets import profile_of
from qat.text import check_types
from tests import estimator_matrix as matrix

ONE, HALF, WEIGHT = torch.tensor(1.0), torch.tensor([0.5]), torch.zeros(4, 3)
INF, NAN = math.inf, math.nan

CASES = [case for case in matrix.all_cases() if not case.name.startswith(("positive_scale", "stochastic_round_ste,"))]
TAKING_FLOATS = {case.name.split(",")[0]: (case.function, *case.inputs) for case in CASES}
TAKING_FLOATS |= {"binary_scale": (binary_scale, WEIGHT), "ternary_scale": (ternary_scale, WEIGHT)}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", TAKING_FLOATS)
def test_only_floating_point_tensors_are_taken(name, dtype):
    function, x, *rest = TAKING_FLOATS[name]
    with pytest.raises(TypeError, match=f"^{name}: .*got {dtype}"):
        function(x.to(dtype), *rest)


@pytest.mark.parametrize(("function", "rest"), [
    (F.lsq_quantize, (ONE,)),
    (F.lsq_plus_quantize, (ONE, ONE)),
    (F.fake_quantize, (ONE, ONE)),
])  # fmt: skip
@pytest.mark.parametrize(("qmin", "qmax"), [(7, 7), (8, -8)])
def test_empty_grids_are_refused(function, rest, qmin, qmax):
    with pytest.raises(ValueError, match=f"^{function.__name__}: .*qmin={qmin} and qmax={qmax}"):
        function(torch.ones(2), *rest, qmin, qmax)


REFUSED = [
    # clamp, signs, EWGS, soft rounding
    (lambda: F.clamp_ste(HALF, 2, 1.5), "low must be at most high, got low=2 and high=1.5"),
    (lambda: F.clamp_ste(HALF, NAN, 1.0), "low must be at most high, got low=nan and high=1.0"),
    (lambda: F.clamp_ste(HALF, 0.0, 1.0, gradient="clip"), "unknown gradient 'clip'; known: clipped, straight_through"),
    (lambda: F.sign_ste(HALF, gradient="tanh"),
     "unknown gradient 'tanh'; known: clipped, straight_through, approximate"),
    (lambda: F.ternary_sign_ste(HALF, gradient="approximate"), "unknown gradient 'approximate'"),
    (lambda: F.ternary_sign_ste(HALF, -0.1), "threshold must be at least 0, got -0.1"),
    (lambda: F.ternary_sign_ste(torch.ones(3, 4), torch.ones(3)), "got shapes (3,) and (3, 4)"),
    (lambda: F.error_decay_sign(HALF, 1.5), "progress must lie in 0..1, got 1.5"),
    (lambda: F.error_decay_sign(HALF, NAN), "progress must lie in 0..1, got nan"),
    (lambda: F.error_decay_sign(HALF, torch.ones(1, 1)), "progress must broadcast to x, got shapes (1, 1) and (1,)"),
    (lambda: F.ewgs_round(HALF, -0.1), "delta must be at least 0, got -0.1"),
    (lambda: F.ewgs_round(HALF, torch.ones(2, 1)), "delta must broadcast to x, got shapes (2, 1) and (1,)"),
    (lambda: F.ewgs_gradient(HALF, 1.0, -0.1), "delta must be at least 0, got -0.1"),
    (lambda: F.ewgs_gradient(HALF, torch.ones(2), 0.1), "scale must broadcast to x, got shapes (2,) and (1,)"),
    (lambda: F.soft_round(HALF, 0), "temperature must be positive and finite, got 0"),
    (lambda: F.soft_round(HALF, INF), "temperature must be positive and finite, got inf"),
    (lambda: F.dsq_round(HALF, torch.ones(2)), "alpha must broadcast to x, got shapes (2,) and (1,)"),
    (lambda: F.dsq_round(HALF, 1.0), "alpha must lie between 0 and 1, got 1.0"),
    (lambda: F.dsq_round(HALF, 0.0), "alpha must lie between 0 and 1, got 0.0"),
    # PACT, DoReFa, APoT, powers of two
    (lambda: F.pact_quantize(HALF, ONE, 17), "bits must be a whole number from 1 to 16, got 17"),
    (lambda: F.pact_quantize(HALF, ONE, 2.5), "bits must be a whole number from 1 to 16, got 2.5"),
    (lambda: F.dorefa_quantize_weight(HALF, 0), "bits must be a whole number from 1 to 16, got 0"),
    (lambda: F.dorefa_quantize_weight(HALF, True), "bits must be a whole number from 1 to 16, got True"),
    (lambda: F.dorefa_quantize_weight(WEIGHT, 4, channel_axis=(0, 2)), "got 2"),
    (lambda: F.dorefa_quantize_activation(HALF, -1), "bits must be a whole number from 1 to 16, got -1"),
    (lambda: F.apot_quantize(HALF, ONE, 1), "bits must be a whole number from 2 to 9, got 1"),
    (lambda: F.apot_quantize(HALF, ONE, 9, signed=False), "bits must be a whole number from 1 to 8, got 9"),
    (lambda: F.apot_levels(9), "bits must be a whole number from 1 to 8, got 9"),
    (lambda: F.normalize_weight(WEIGHT, channel_axis=-3), "got -3"),
    (lambda: F.power_of_two_scale(ONE, "down"), "unknown rounding 'down'; known: nearest, up"),
    # binary and ternary
    (lambda: F.binary_quantize(WEIGHT, 2), "channel_axis must be in -2..1 for a weight of shape (4, 3), got 2"),
    (lambda: F.binary_quantize(WEIGHT, (0, -3)), "channel_axis must be in -2..1 for a weight of shape (4, 3), got -3"),
    (lambda: binary_scale(ONE), "channel_axis must be None for a weight of shape (), got 0"),
    (lambda: F.binary_quantize(WEIGHT, gradient="cliped"), "unknown gradient 'cliped'"),
    (lambda: F.binary_quantize(WEIGHT, gradient="error_decay"), "got None"),
    (lambda: F.binary_quantize(WEIGHT, gradient="clipped", progress=0.5), "got it with 'clipped'"),
    (lambda: F.binary_quantize(WEIGHT, gradient="error_decay", progress=90), "progress must lie in 0..1, got 90"),
    (lambda: F.ternary_quantize(WEIGHT, -3), "channel_axis must be in -2..1 for a weight of shape (4, 3), got -3"),
    (lambda: ternary_scale(WEIGHT, 5), "channel_axis must be in -2..1 for a weight of shape (4, 3), got 5"),
    (lambda: F.ttq_quantize(WEIGHT, ONE, ONE, 1.0), "threshold must be in 0..1 and below 1, got 1.0"),
    (lambda: F.ttq_quantize(WEIGHT, ONE, ONE, NAN), "threshold must be in 0..1 and below 1, got nan"),
    (lambda: F.ttq_quantize(WEIGHT, torch.ones(4), ONE), "got shape (4,)"),
    (lambda: F.ttq_quantize(WEIGHT, ONE, torch.ones(1, 4, 1)), "got shape (1, 4, 1)"),
    # N2UQ, floats, MX blocks
    (lambda: F.n2uq_quantize(WEIGHT, torch.zeros(3), torch.ones(3), ONE),
     "start must have one element, got shape (3,)"),
    (lambda: F.n2uq_quantize(WEIGHT, ONE, torch.ones(2, 3), ONE), "got (2, 3)"),
    (lambda: F.n2uq_quantize(WEIGHT, ONE, torch.ones(0), ONE), "got (0,)"),
    (lambda: F.float_quantize(WEIGHT, ONE, "int8"), "unknown format 'int8'; known: e4m3, e5m2, e3m2, e2m3, e2m1"),
    (lambda: F.mx_quantize(WEIGHT, "fp4"), "unknown format 'fp4'; known: e4m3, e5m2, e3m2, e2m3, e2m1, int8"),
    (lambda: F.mx_quantize(WEIGHT, "e2m1", axis=2), "axis must be in -2..1 for x of shape (4, 3), got 2"),
    (lambda: F.mx_quantize(torch.zeros(4, 48), "e2m1"), "got 32; its divisors: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"),
    (lambda: F.mx_quantize(WEIGHT, "e2m1", 0), "block_size must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "fact"), REFUSED, ids=[fact for _, fact in REFUSED])
def test_wrong_arguments_are_refused_by_name_and_value(call, fact):
    with pytest.raises(ValueError) as refusal:
        call()
    name = next(name for name in call.__code__.co_names if name != "F")  # the function is the first that is called
    assert str(refusal.value).startswith(f"{name}: ") and fact in str(refusal.value)


PROFILE = profile_of("onnxruntime")
LIMITS = PROFILE.weight_limits
MODEL = qat.prepare(nn.Sequential(nn.Linear(4, 4)), qat.QuantRecipe({"bits": 4}), torch.randn(2, 4))

WRONG: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (partial(replace, PROFILE), {"float_biases": 1}, "TargetProfile: float_biases must be true or false"),
    (partial(replace, PROFILE), {"weight": {"bits": 8}}, "TargetProfile: weight must be a QuantSpec, got"),
    (partial(replace, PROFILE), {"shared_grids": {"cat"}}, "TargetProfile: shared_grids must be a frozenset"),
    (partial(replace, PROFILE), {"fixed_grids": {"tanh": 3}}, "TargetProfile: fixed_grids must be a mapping"),
    (partial(replace, LIMITS), {"most_bits": "8"}, "GridLimits: most_bits must be a whole number, got '8'"),
    (partial(replace, LIMITS), {"granularities": ("row",)}, "GridLimits: granularities must be a tuple"),
    (AdaRound, {"iterations": "10"}, "AdaRound: iterations must be a whole number, got '10'"),
    (QDrop, {"drop": True}, "QDrop: drop must be a number, got True"),
    (CrossLayerEqualization, {"rounds": 2.5}, "CrossLayerEqualization: rounds must be a whole number, got 2.5"),
    (EMA, {"model": MODEL, "decay": "0.9"}, "EMA: decay must be a number, got '0.9'"),
    (Oscillations, {"model": MODEL, "freeze": "yes"}, "Oscillations: freeze must be a number or None, got 'yes'"),
    (QuantNoise, {"model": MODEL, "share": True}, "QuantNoise: share must be a number"),
    (Distillation, {"teacher": MODEL, "features": {"0": "x"}}, "Distillation: features must be a mapping or None, got"),
    (qat.freeze_scales, {"model": MODEL, "frozen": "no"}, "freeze_scales: frozen must be true or false, got 'no'"),
    (qat.freeze_batch_norm, {"model": MODEL, "frozen": 0}, "freeze_batch_norm: frozen must be true or false, got 0"),
    (qat.disable_fake_quant, {"model": MODEL, "weights": "no"}, "disable_fake_quant: weights must be true or false"),
    (partial(qat.parameter_groups, MODEL, 0.1), {"weight_decay_by_bits": "no"},
     "parameter_groups: weight_decay_by_bits must be true or false"),
    (partial(qat.calibrate, MODEL, []), {"limit": "1"}, "calibrate: limit must be a whole number or None, got '1'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "said"), WRONG)
def test_a_setting_of_the_wrong_type_is_refused(call: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        call(**given)
    assert str(refusal.value).startswith(said)


def test_what_fits_passes() -> None:
    def f(a: float, b: Optional[int], c: Literal["x"] | None, d: tuple[bool, ...], e: Any, g: bool = True) -> None: ...  # noqa: UP045

    for given in ({"a": 1, "b": None, "c": "x", "d": (True,)}, {"a": 0.5, "b": 3, "c": None, "d": (), "e": True}):
        check_types(f, given)
    for wrong in ({"a": "1"}, {"b": 1.0}, {"c": "y"}, {"d": (1,)}, {"g": None}):
        with pytest.raises(ValueError, match=f"f: {next(iter(wrong))} must be "):
            check_types(f, wrong)
