"""QuantSpec: the integers of each grid, its text, and the message for every mistake."""

import copy
import pickle
from dataclasses import replace

import pytest

from qat.spec import QuantSpec, default_activation_spec, default_spec, default_weight_spec
from tests.references import reference
from tests.references.rule_specs import plain


@pytest.mark.parametrize("bits", range(2, 17))
def test_bounds_are_those_of_the_grid(bits):
    for signed, narrow in ((True, False), (True, True), (False, False)):
        spec = QuantSpec(bits=bits, signed=signed, narrow_range=narrow)
        assert (spec.qmin, spec.qmax) == reference.bounds(bits, signed, narrow)
        assert type(spec.qmin) is int and type(spec.qmax) is int


def test_the_defaults_are_the_documented_ones():
    weight, activation = default_weight_spec(), default_activation_spec()
    assert (weight.qmin, weight.qmax, weight.symmetric, weight.granularity) == (-127, 127, True, "channel")
    assert (activation.qmin, activation.qmax, activation.symmetric, activation.granularity) == (0, 255, False, "tensor")
    assert default_spec("weight") == weight and default_spec("activation") == activation
    assert weight == QuantSpec(
        8, True, True, "channel", "lsq", True, "minmax", 99.99, "sample", options={}, ewgs="none"
    )


EVERY_FORM = {
    "new": QuantSpec(bits=4, init="mse"),
    "replaced": replace(QuantSpec(bits=4), init="mse"),
    "changed": QuantSpec(bits=4).changed({"init": "mse"}),
    "copied": copy.deepcopy(QuantSpec(bits=4, init="mse")),
    "pickled": pickle.loads(pickle.dumps(QuantSpec(bits=4, init="mse"))),
}


@pytest.mark.parametrize("spec", EVERY_FORM.values(), ids=EVERY_FORM.keys())
def test_what_is_left_out_is_left_open_and_stays_so_in_copies(spec):
    assert spec == QuantSpec(bits=4, init="mse") and hash(spec) == hash(QuantSpec(bits=4, init="mse"))
    assert repr(spec) == str(spec) == "QuantSpec(bits=4, init='mse')" and eval(repr(spec)) == spec
    assert spec.granularity is None and spec.signed is None
    weight, activation = (spec.resolved(default_spec(role)) for role in ("weight", "activation"))
    assert weight == replace(default_weight_spec(), bits=4, init="mse") != spec
    assert activation == replace(default_activation_spec(), bits=4)


def test_a_complete_spec_stays_as_it_is():
    assert plain().resolved(default_activation_spec()) is not None
    for default in (default_weight_spec(), default_activation_spec(), plain(max_magnitude=5)):
        assert plain().resolved(default) == plain()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"rule": "pact"}, {"rule": "pact", "options": {}, "grad_scale": "none"}),
        ({"rule": "dsq", "bits": 3}, {"bits": 3, "narrow_range": False}),
        ({"granularity": "tensor"}, {"granularity": "tensor", "group_size": None}),
        ({"ewgs": "none"}, {"ewgs": "none", "ewgs_delta": None}),
        ({"signed": False}, {"signed": False, "narrow_range": False}),
        ({"bits": None, "init": None}, {}),
        ({"max_magnitude": None}, {"max_magnitude": None}),
    ],
)
def test_what_belongs_to_an_old_value_goes_with_it(change, left):
    spec = QuantSpec(4, True, True, "group", "dsq", True, "mse", 99.0, "batch", 8, {"alpha": 0.3}, "fixed", 0.1, 5)
    assert spec.changed(change) == replace(spec, **left)


@pytest.mark.parametrize(
    ("change", "narrow", "init"),
    [
        ({"bits": 16}, True, "minmax"),
        ({"bits": 4}, True, "mse"),  # extremes leave most of few levels to a few values
        ({"bits": 3}, False, "mse"),
        ({"bits": 2}, False, "mse"),  # four levels in place of three
        ({"bits": 1}, True, "mse"),
        ({"bits": 2, "narrow_range": True, "init": "percentile"}, True, "percentile"),
        ({"bits": 4, "rule": "minmax"}, True, "minmax"),  # which takes no other
        ({"bits": 4, "rule": "ema"}, True, "minmax"),  # to which it moves
        ({"bits": 2, "signed": False}, False, "mse"),
    ],
)
def test_few_bits_have_choices_of_their_own(change, narrow, init):
    weight = default_weight_spec().changed(change)
    assert (weight.narrow_range, weight.init) == (narrow, init)
    assert weight.changed({"bits": 8, "signed": True}).narrow_range
    assert QuantSpec(**change).resolved(default_weight_spec()) == weight


def test_a_range_that_was_chosen_against_the_bits_stays():
    wide = default_weight_spec().changed({"narrow_range": False})
    assert not wide.changed({"bits": 4}).narrow_range and not wide.changed({"bits": 2}).narrow_range
    narrow = default_weight_spec().changed({"bits": 2, "narrow_range": True})
    assert narrow.changed({"bits": 3}).narrow_range and narrow.changed({"bits": 8}).narrow_range


def test_what_is_left_open_counts_as_signed_wide_and_eight_bits_in_the_integers():
    bounds = {
        QuantSpec(bits=4): (-8, 7),
        QuantSpec(signed=False): (0, 255),
        QuantSpec(bits=4, signed=False): (0, 15),
        QuantSpec(bits=4, narrow_range=True): (-7, 7),
        QuantSpec(max_magnitude=64): (-64, 64),
    }
    assert {spec: (spec.qmin, spec.qmax) for spec in bounds} == bounds


@pytest.mark.parametrize(
    ("spec", "low", "high", "words"),
    [
        (plain(max_magnitude=64), -64, 64, "int8 in -64..64 symmetric per tensor"),
        (plain(narrow_range=True, max_magnitude=64), -64, 64, "int8 in -64..64 symmetric per tensor"),
        (plain(bits=7, max_magnitude=64), -64, 63, "int7 in -64..63 symmetric per tensor"),
        (plain(bits=7, narrow_range=True, max_magnitude=64), -63, 63, "int7 narrow symmetric per tensor"),
        (plain(bits=4, max_magnitude=64), -8, 7, "int4 symmetric per tensor"),
        (plain(signed=False, max_magnitude=127), 0, 127, "uint8 in 0..127 symmetric per tensor"),
        (plain(max_magnitude=1), -1, 1, "int8 in -1..1 symmetric per tensor"),
    ],
)
def test_a_largest_magnitude_narrows_the_grid(spec, low, high, words):
    assert (spec.qmin, spec.qmax, str(spec)) == (low, high, words)


def test_a_spec_reads_as_one_line():
    assert str(plain()) == "int8 symmetric per tensor"
    assert str(default_weight_spec()) == "int8 narrow symmetric per channel"
    assert str(plain(bits=4, signed=False, symmetric=False)) == "uint4 affine per tensor"


@pytest.mark.parametrize(
    ("wrong", "fact"),
    [
        *(
            ({"bits": bits}, f"bits must be a whole number{limits}, got {bits!r}")
            for bits, limits in ((0, " from 1 to 16"), (17, " from 1 to 16"), (8.0, ""), (True, ""), ("8", ""))
        ),
        # Point 56: the library checks types as the YAML does.
        ({"signed": "no"}, "signed must be true or false, got 'no'"),
        ({"symmetric": 1}, "symmetric must be true or false, got 1"),
        ({"narrow_range": "yes"}, "narrow_range must be true or false, got 'yes'"),
        ({"rule": 4}, "rule must be text, got 4"),
        ({"ewgs_delta": True}, "ewgs_delta must be a number or None, got True"),
        ({"group_size": "8"}, "group_size must be a whole number or None, got '8'"),
        *(({"percentile": wrong}, f"percentile .* got {wrong!r}") for wrong in (50, 100.1, float("nan"), "99")),
        *(({"max_magnitude": wrong}, f"max_magnitude .* got {wrong!r}") for wrong in (0, 64.0, True)),
        ({"granularity": "group"}, "group_size of at least 1, got None"),
        ({"granularity": "channel", "group_size": 8}, "group_size=8 has no effect with granularity='channel'"),
        ({"ewgs_delta": -0.1}, "ewgs_delta .* got -0.1"),
        ({"ewgs": "none", "ewgs_delta": 0.1}, "ewgs_delta=0.1 has no effect with ewgs='none'"),
        ({"options": 3}, "options must be a mapping, got 3"),
        ({"granularity": "row"}, "granularity must be one of tensor, channel, group, got 'row'"),
        ({"init": "max"}, "init must be one of minmax, percentile, mse, lsq, got 'max'"),
        ({"grad_scale": 1.0}, "grad_scale must be one of sample, batch, none, relative, got 1.0"),
        ({"signed": False, "narrow_range": True}, "narrow_range=True needs signed=True"),
    ],
)
def test_a_wrong_spec_is_refused(wrong, fact):
    with pytest.raises(ValueError, match=f"^QuantSpec: .*{fact}"):
        QuantSpec(**wrong)


def test_the_ends_of_the_percentile_are_allowed():
    assert QuantSpec(percentile=100).percentile == 100 and QuantSpec(percentile=50.01).percentile == 50.01
