"""Specs and options that a rule refuses, with the exact messages."""

import dataclasses
import math

import pytest
import rule_specs as specs
import torch
from rule_specs import AFFINE_WEIGHT, EWGS, GROUPS, SIGNED, TENSOR, activation, weight
from torch import nn

import qat
from qat.quantizer import create_quantizer

NAN, INF = math.nan, math.inf

# Specs and options.


def test_every_wrong_option_is_a_sentence():
    for rule, wrong, sentence in WRONG_OPTIONS:
        role, spec = next(row for row in specs.QUANTIZERS.values() if row[1].rule == rule)
        with pytest.raises(ValueError) as refusal:
            specs.new(role, dataclasses.replace(spec, options=wrong))
        assert str(refusal.value) == f"rule {rule!r}: {sentence}"


WRONG_OPTIONS = [
    ("ema", {"momentun": 0.1}, "unknown option 'momentun'; did you mean 'momentum'?"),
    ("ema", {"rate": 0.1}, "unknown option 'rate'; it takes momentum"),
    ("ema", {"momentum": "0.1"}, "option 'momentum' must be a number, got '0.1'"),
    ("ema", {"momentum": True}, "option 'momentum' must be a number, got True"),
    ("ema", {"momentum": 0}, "option 'momentum' must be above 0 and at most 1, got 0"),
    ("ema", {"momentum": 1.5}, "option 'momentum' must be above 0 and at most 1, got 1.5"),
    ("ema", {"momentum": NAN}, "option 'momentum' must be above 0 and at most 1, got nan"),
    ("lsq", {"alpha": 1.0}, "unknown option 'alpha'; it takes none"),
    ("ternary", {"threshold": 0.1}, "unknown option 'threshold'; it takes none"),
    ("pact", {"alpha_decay": -1e-4}, "option 'alpha_decay' must be at least 0 and finite, got -0.0001"),
    ("pact", {"alpha_decay": INF}, "option 'alpha_decay' must be at least 0 and finite, got inf"),
    ("pact", {"alpha": 1.0}, "unknown option 'alpha'; did you mean 'alpha_decay'?"),
    ("apot", {"normalize": 1}, "option 'normalize' must be true or false, got 1"),
    ("apot", {"normalise": True}, "unknown option 'normalise'; did you mean 'normalize'?"),
    ("binary", {"gradient": 1}, "option 'gradient' must be text, got 1"),
    (
        "binary",
        {"gradient": "aproximate"},
        "option 'gradient' must be one of clipped, approximate, error_decay, straight_through, got 'aproximate'",
    ),
    ("ttq", {"threshold": 1}, "option 'threshold' must be from 0 to below 1, got 1"),
    ("ttq", {"threshold": -0.1}, "option 'threshold' must be from 0 to below 1, got -0.1"),
    ("dsq", {"alpha": 1.0}, "option 'alpha' must be above 0 and below 1, got 1.0"),
    ("dsq", {"alpha": 0}, "option 'alpha' must be above 0 and below 1, got 0"),
    ("stacked_sigmoid", {"start": 0.0}, "options must hold 0 < start <= end, got start=0.0 and end=100.0"),
    ("stacked_sigmoid", {"end": 1}, "options must hold 0 < start <= end, got start=5.0 and end=1"),
    ("stacked_sigmoid", {"end": INF}, "options must hold 0 < start <= end, got start=5.0 and end=inf"),
    ("mxfp8", {"format": "e2m1"}, "option 'format' must be one of e4m3, e5m2, got 'e2m1'"),
    ("mxfp6", {"format": "e4m3"}, "option 'format' must be one of e2m3, e3m2, got 'e4m3'"),
    ("mxfp4", {"format": "int8"}, "option 'format' must be one of e2m1, got 'int8'"),
    ("mxint8", {"format": "e4m3"}, "option 'format' must be one of int8, got 'e4m3'"),
    ("mxfp8", {"block_size": 0}, "option 'block_size' must be at least 1, got 0"),
    ("mxfp8", {"block_size": 32.0}, "option 'block_size' must be a whole number, got 32.0"),
    ("mxfp8", {"blocksize": 32}, "unknown option 'blocksize'; did you mean 'block_size'?"),
    ("learned_bits", {"least": 0}, "option 'least' must be from 1 to 16, got 0"),
    ("learned_bits", {"least": 17}, "option 'least' must be from 1 to 16, got 17"),
    ("learned_bits", {"least": 2.5}, "option 'least' must be a whole number, got 2.5"),
    ("learned_bits", {"cost": -1.0}, "option 'cost' must be at least 0 and finite, got -1.0"),
    ("learned_bits", {"cost": NAN}, "option 'cost' must be at least 0 and finite, got nan"),
]

SIGN_AND_ZERO = "has a sign and no zero point; set signed=True and symmetric=True"
NOT_UNIFORM = "corrects the rounding to a uniform grid, which it does not do; use ewgs='none'"

WRONG_SPECS = [
    # the wrong kind of tensor
    ("activation", activation("ternary", 2, SIGNED),
     "rule 'ternary' is for weights only; choose another for activations"),
    ("activation", activation("ttq", 2, SIGNED), "rule 'ttq' is for weights only; choose another for activations"),
    ("weight", weight("pact", 4, {"signed": False, "narrow_range": False, "symmetric": False}),
     "rule 'pact' is for activations only; choose another for weights"),
    # the wrong number of bits
    ("activation", activation("lsq", 1, SIGNED), "rule 'lsq': a signed grid needs at least 2 bits, got bits=1; use the"
     " rule 'binary' for one bit, or signed=False"),
    ("weight", weight("dsq", 1), "rule 'dsq': a signed grid needs at least 2 bits, got bits=1; use the rule 'binary'"
     " for one bit, or signed=False"),
    ("weight", weight("binary", 2), "rule 'binary' has 1 bit; set bits=1, got 2"),
    ("weight", weight("ternary", 3), "rule 'ternary' has 2 bits; set bits=2, got 3"),
    ("weight", weight("ttq", 8), "rule 'ttq' has 2 bits; set bits=2, got 8"),
    ("weight", weight("fp8_e4m3", 4), "rule 'fp8_e4m3' has 8 bits; set bits=8, got 4"),
    ("weight", weight("fp8_e5m2", 16), "rule 'fp8_e5m2' has 8 bits; set bits=8, got 16"),
    ("weight", weight("mxfp8", 4), "rule 'mxfp8' has 8 bits; set bits=8, got 4"),
    ("weight", weight("mxfp6", 8), "rule 'mxfp6' has 6 bits; set bits=6, got 8"),
    ("weight", weight("mxfp4", 8), "rule 'mxfp4' has 4 bits; set bits=4, got 8"),
    ("weight", weight("mxint8", 6), "rule 'mxint8' has 8 bits; set bits=8, got 6"),
    ("weight", weight("apot", 1), "rule 'apot' has 2 to 9 bits with signed=True, got bits=1"),
    ("weight", weight("apot", 10), "rule 'apot' has 2 to 9 bits with signed=True, got bits=10"),
    ("activation", activation("apot", 9, specs.FROM_ZERO), "rule 'apot' has 1 to 8 bits with signed=False, got bits=9"),
    ("weight", weight("n2uq", 9, TENSOR), "rule 'n2uq' learns a width per level and takes at most 8 bits, got bits=9"),
    ("weight", weight("learned_bits", 4, least=5),
     "rule 'learned_bits': option 'least' is 5, more than the 4 bits of the spec"),
    ("activation", activation("learned_bits", 1, specs.FROM_ZERO),
     "rule 'learned_bits': option 'least' is 2, more than the 1 bits of the spec"),
    # the wrong sign or symmetry
    ("activation", activation("lsq_plus", 8, SIGNED),
     "lsq_plus learns a zero point and needs symmetric=False; use 'lsq' on a symmetric grid"),
    ("activation", activation("pact", 8, SIGNED), "rule 'pact' clips to 0 .. alpha and needs signed=False"),
    ("activation", activation("dorefa", 8, SIGNED), "rule 'dorefa' clips activations to 0 .. 1 and needs signed=False"),
    ("weight", weight("dorefa", 4, AFFINE_WEIGHT),
     "rule 'dorefa' puts weights on levels from -1 to 1 and needs signed=True, symmetric=True"),
    ("weight", weight("apot", 4, AFFINE_WEIGHT), "rule 'apot' has levels around 0 and needs symmetric=True"),
    ("activation", activation("binary", 1), f"rule 'binary' {SIGN_AND_ZERO}"),
    ("weight", weight("ternary", 2, AFFINE_WEIGHT), f"rule 'ternary' {SIGN_AND_ZERO}"),
    ("weight", weight("n2uq", 4), "rule 'n2uq' needs symmetric=True and granularity='tensor'"),
    ("activation", activation("n2uq", 4), "rule 'n2uq' needs symmetric=True and granularity='tensor'"),
    ("activation", activation("fp8_e4m3"), f"rule 'fp8_e4m3' {SIGN_AND_ZERO}"),
    ("activation", activation("mxfp4", 4), f"rule 'mxfp4' {SIGN_AND_ZERO}"),
    ("activation", activation("learned_bits"), "rule 'learned_bits' has no zero point and needs symmetric=True"),
    # granularity, start and EWGS
    ("weight", weight("mxfp8", 8, GROUPS),
     "rule 'mxfp8' has blocks of its own; use options={'block_size': ...} instead of groups"),
    ("weight", weight("minmax", 8, {"init": "mse"}),
     "rule 'minmax' finds a weight's range anew at every step: init='mse' has no effect; use init='minmax'"),
    *(
        (role, dataclasses.replace(spec, **EWGS), f"rule {spec.rule!r}: ewgs='fixed' {NOT_UNIFORM}")
        for role, spec in (specs.QUANTIZERS[f"weight {rule}"] for rule in (
            "dorefa", "apot", "binary", "ternary", "ttq", "n2uq", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp6", "mxfp4",
            "mxint8"))
    ),
    ("activation", dataclasses.replace(specs.ACTIVATIONS["n2uq"], ewgs="hessian"),
     f"rule 'n2uq': ewgs='hessian' {NOT_UNIFORM}"),
]  # fmt: skip


@pytest.mark.parametrize(("role", "spec", "sentence"), WRONG_SPECS, ids=[row[2][:50] for row in WRONG_SPECS])
def test_every_grid_that_a_rule_cannot_have_is_a_sentence(role, spec, sentence):
    with pytest.raises(ValueError) as refusal:
        specs.new(role, spec)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("change", [{"granularity": "channel"}, GROUPS])
def test_a_layer_refuses_scales_that_its_input_cannot_have(change):
    with pytest.raises(ValueError) as refusal:
        qat.QuantLinear(8, 3, activation_spec=activation("lsq", 8, change))
    assert str(refusal.value) == (
        f"activation_spec: granularity {change['granularity']!r} is for weights; use granularity='tensor'"
    )


def test_negative_values_on_a_grid_without_them_are_refused_by_name():
    x = torch.tensor([[-1.25, 2.0]])
    for spec in (activation("lsq", 8, specs.FROM_ZERO), activation("learned_bits", 8, specs.FROM_ZERO)):
        model = nn.Sequential(create_quantizer(spec))
        with pytest.raises(ValueError) as refusal:
            qat.calibrate(model, [x])
        assert str(refusal.value) == (
            "calibrate: quantizer '0': values down to -1.25, which its grid (uint8 symmetric per tensor) cannot hold;"
            " use signed=True or symmetric=False"
        )
