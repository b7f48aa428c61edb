"""The refusals of qat.functional, word for word: wrong dtypes, and arguments that a rule cannot take."""

import math

import pytest
import torch

from qat.functional.clamping import clamp_ste
from qat.functional.codebooks.apot import apot_levels, apot_quantize, normalize_weight
from qat.functional.codebooks.binary import binary_quantize, binary_scale
from qat.functional.codebooks.floats import float_quantize, mx_quantize
from qat.functional.codebooks.n2uq import n2uq_quantize
from qat.functional.codebooks.ternary import ternary_quantize, ternary_scale, ttq_quantize
from qat.functional.dorefa import dorefa_quantize_activation, dorefa_quantize_weight
from qat.functional.ewgs import ewgs_gradient, ewgs_round
from qat.functional.learned_bits import learned_bits_quantize
from qat.functional.lsq import fake_quantize, lsq_plus_quantize, lsq_quantize
from qat.functional.pact import pact_quantize
from qat.functional.power_of_two import power_of_two_scale
from qat.functional.rounding import ceil_ste, floor_ste, round_ste, stochastic_round_ste, trunc_ste
from qat.functional.sign import error_decay_sign, sign_ste, ternary_sign_ste
from qat.functional.soft import dsq_round, soft_round

ONE, HALF, WEIGHT = torch.tensor(1.0), torch.tensor([0.5]), torch.zeros(4, 3)
INF, NAN = math.inf, math.nan

TAKING_FLOATS = [
    (round_ste, ()), (floor_ste, ()), (ceil_ste, ()), (trunc_ste, ()), (stochastic_round_ste, ()), (sign_ste, ()),
    (ternary_sign_ste, ()), (clamp_ste, (0.0, 1.0)), (error_decay_sign, (0.5,)), (ewgs_round, (0.1,)),
    (ewgs_gradient, (1.0, 0.1)), (soft_round, (1.0,)), (dsq_round, (0.5,)), (lsq_quantize, (ONE, -8, 7)),
    (lsq_plus_quantize, (ONE, ONE, -8, 7)), (fake_quantize, (ONE, ONE, -8, 7)), (pact_quantize, (ONE, 4)),
    (dorefa_quantize_weight, (4,)), (dorefa_quantize_activation, (4,)), (apot_quantize, (ONE, 4)),
    (normalize_weight, ()), (learned_bits_quantize, (ONE, ONE)), (binary_quantize, ()), (binary_scale, ()),
    (ternary_quantize, ()), (ternary_scale, ()), (ttq_quantize, (ONE, ONE)), (n2uq_quantize, (ONE, torch.ones(3), ONE)),
    (float_quantize, (ONE, "e4m3")), (mx_quantize, ("e4m3",)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize(("function", "rest"), TAKING_FLOATS, ids=lambda each: getattr(each, "__name__", ""))
def test_only_floating_point_tensors_are_taken(function, rest, dtype):
    with pytest.raises(TypeError) as refusal:
        function(torch.ones(2, 2, dtype=dtype), *rest)
    assert str(refusal.value) == f"{function.__name__}: x must be a floating-point tensor, got {dtype}"


@pytest.mark.parametrize(("function", "rest"), [(lsq_quantize, (ONE,)), (lsq_plus_quantize, (ONE, ONE)),
                                                (fake_quantize, (ONE, ONE))])  # fmt: skip
@pytest.mark.parametrize(("qmin", "qmax"), [(7, 7), (8, -8)])
def test_empty_grids_are_refused(function, rest, qmin, qmax):
    with pytest.raises(ValueError) as refusal:
        function(torch.ones(2), *rest, qmin, qmax)
    assert str(refusal.value) == f"{function.__name__}: qmin must be below qmax, got qmin={qmin} and qmax={qmax}"


REFUSED = [
    # clamp, signs, EWGS, soft rounding
    (lambda: clamp_ste(HALF, 2, 1.5), "clamp_ste: low must be at most high, got low=2 and high=1.5"),
    (lambda: clamp_ste(HALF, NAN, 1.0), "clamp_ste: low must be at most high, got low=nan and high=1.0"),
    (lambda: clamp_ste(HALF, 0.0, 1.0, gradient="clip"),
     "clamp_ste: unknown gradient 'clip'; known: clipped, straight_through"),
    (lambda: sign_ste(HALF, gradient="tanh"),
     "sign_ste: unknown gradient 'tanh'; known: clipped, straight_through, approximate"),
    (lambda: ternary_sign_ste(HALF, gradient="approximate"),
     "ternary_sign_ste: unknown gradient 'approximate'; known: clipped, straight_through"),
    (lambda: ternary_sign_ste(HALF, -0.1), "ternary_sign_ste: threshold must be at least 0, got -0.1"),
    (lambda: ternary_sign_ste(torch.ones(3, 4), torch.ones(3)),
     "ternary_sign_ste: threshold must broadcast to x, got shapes (3,) and (3, 4)"),
    (lambda: error_decay_sign(HALF, 1.5), "error_decay_sign: progress must lie in 0..1, got 1.5"),
    (lambda: error_decay_sign(HALF, NAN), "error_decay_sign: progress must lie in 0..1, got nan"),
    (lambda: error_decay_sign(HALF, torch.ones(1, 1)),
     "error_decay_sign: progress must broadcast to x, got shapes (1, 1) and (1,)"),
    (lambda: ewgs_round(HALF, -0.1), "ewgs_round: delta must be at least 0, got -0.1"),
    (lambda: ewgs_round(HALF, torch.ones(2, 1)), "ewgs_round: delta must broadcast to x, got shapes (2, 1) and (1,)"),
    (lambda: ewgs_gradient(HALF, 1.0, -0.1), "ewgs_gradient: delta must be at least 0, got -0.1"),
    (lambda: ewgs_gradient(HALF, torch.ones(2), 0.1),
     "ewgs_gradient: scale must broadcast to x, got shapes (2,) and (1,)"),
    (lambda: soft_round(HALF, 0), "soft_round: temperature must be positive and finite, got 0"),
    (lambda: soft_round(HALF, INF), "soft_round: temperature must be positive and finite, got inf"),
    (lambda: dsq_round(HALF, torch.ones(2)), "dsq_round: alpha must broadcast to x, got shapes (2,) and (1,)"),
    (lambda: dsq_round(HALF, 1.0), "dsq_round: alpha must lie between 0 and 1, got 1.0"),
    (lambda: dsq_round(HALF, 0.0), "dsq_round: alpha must lie between 0 and 1, got 0.0"),
    # PACT, DoReFa, APoT, powers of two
    (lambda: pact_quantize(HALF, ONE, 17), "pact_quantize: bits must be a whole number from 1 to 16, got 17"),
    (lambda: pact_quantize(HALF, ONE, 2.5), "pact_quantize: bits must be a whole number from 1 to 16, got 2.5"),
    (lambda: dorefa_quantize_weight(HALF, 0),
     "dorefa_quantize_weight: bits must be a whole number from 1 to 16, got 0"),
    (lambda: dorefa_quantize_weight(HALF, True),
     "dorefa_quantize_weight: bits must be a whole number from 1 to 16, got True"),
    (lambda: dorefa_quantize_weight(WEIGHT, 4, channel_axis=(0, 2)),
     "dorefa_quantize_weight: channel_axis must be in -2..1 for a weight of shape (4, 3), got 2"),
    (lambda: dorefa_quantize_activation(HALF, -1),
     "dorefa_quantize_activation: bits must be a whole number from 1 to 16, got -1"),
    (lambda: apot_quantize(HALF, ONE, 1), "apot_quantize: bits must be a whole number from 2 to 9, got 1"),
    (lambda: apot_quantize(HALF, ONE, 9, signed=False),
     "apot_quantize: bits must be a whole number from 1 to 8, got 9"),
    (lambda: apot_levels(9), "apot_levels: bits must be a whole number from 1 to 8, got 9"),
    (lambda: normalize_weight(WEIGHT, channel_axis=-3),
     "normalize_weight: channel_axis must be in -2..1 for a weight of shape (4, 3), got -3"),
    (lambda: power_of_two_scale(ONE, "down"), "power_of_two_scale: unknown rounding 'down'; known: nearest, up"),
    # binary and ternary
    (lambda: binary_quantize(WEIGHT, 2),
     "binary_quantize: channel_axis must be in -2..1 for a weight of shape (4, 3), got 2"),
    (lambda: binary_quantize(WEIGHT, (0, -3)),
     "binary_quantize: channel_axis must be in -2..1 for a weight of shape (4, 3), got -3"),
    (lambda: binary_scale(ONE), "binary_scale: channel_axis must be None for a weight of shape (), got 0"),
    (lambda: binary_quantize(WEIGHT, gradient="cliped"),
     "binary_quantize: unknown gradient 'cliped'; known: clipped, approximate, error_decay, straight_through"),
    (lambda: binary_quantize(WEIGHT, gradient="error_decay"),
     "binary_quantize: gradient 'error_decay' needs progress, a number in 0..1, got None"),
    (lambda: binary_quantize(WEIGHT, gradient="clipped", progress=0.5),
     "binary_quantize: only gradient 'error_decay' takes progress, got it with 'clipped'"),
    (lambda: binary_quantize(WEIGHT, gradient="error_decay", progress=90),
     "binary_quantize: progress must lie in 0..1, got 90"),
    (lambda: ternary_quantize(WEIGHT, -3),
     "ternary_quantize: channel_axis must be in -2..1 for a weight of shape (4, 3), got -3"),
    (lambda: ternary_scale(WEIGHT, 5),
     "ternary_scale: channel_axis must be in -2..1 for a weight of shape (4, 3), got 5"),
    (lambda: ttq_quantize(WEIGHT, ONE, ONE, 1.0), "ttq_quantize: threshold must be in 0..1 and below 1, got 1.0"),
    (lambda: ttq_quantize(WEIGHT, ONE, ONE, NAN), "ttq_quantize: threshold must be in 0..1 and below 1, got nan"),
    (lambda: ttq_quantize(WEIGHT, torch.ones(4), ONE),
     "ttq_quantize: positive must broadcast to the weight's shape (4, 3), got shape (4,)"),
    (lambda: ttq_quantize(WEIGHT, ONE, torch.ones(1, 4, 1)),
     "ttq_quantize: negative must broadcast to the weight's shape (4, 3), got shape (1, 4, 1)"),
    # N2UQ, floats, MX blocks
    (lambda: n2uq_quantize(WEIGHT, torch.zeros(3), torch.ones(3), ONE),
     "n2uq_quantize: start must have one element, got shape (3,)"),
    (lambda: n2uq_quantize(WEIGHT, ONE, torch.ones(2, 3), ONE),
     "n2uq_quantize: widths must have shape (n,), one for each step, got (2, 3)"),
    (lambda: n2uq_quantize(WEIGHT, ONE, torch.ones(0), ONE),
     "n2uq_quantize: widths must have shape (n,), one for each step, got (0,)"),
    (lambda: float_quantize(WEIGHT, ONE, "int8"),
     "float_quantize: unknown format 'int8'; known: e4m3, e5m2, e3m2, e2m3, e2m1"),
    (lambda: mx_quantize(WEIGHT, "fp4"),
     "mx_quantize: unknown format 'fp4'; known: e4m3, e5m2, e3m2, e2m3, e2m1, int8"),
    (lambda: mx_quantize(WEIGHT, "e2m1", axis=2), "mx_quantize: axis must be in -2..1 for x of shape (4, 3), got 2"),
    (lambda: mx_quantize(torch.zeros(4, 48), "e2m1"),
     "mx_quantize: block_size must divide the length of axis -1, which is 48, got 32; "
     "its divisors: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48"),
    (lambda: mx_quantize(WEIGHT, "e2m1", 0), "mx_quantize: block_size must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_wrong_arguments_are_refused_in_one_sentence(call, sentence):
    with pytest.raises(ValueError) as refusal:
        call()
    assert str(refusal.value) == sentence
