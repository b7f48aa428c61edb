"""Grids and recipes: the integers, the overrides, and the sentence for every mistake."""

from dataclasses import replace

import pytest
import reference

from qat.spec import QuantRecipe, QuantSpec, default_activation_spec, default_weight_spec

VALID_KEYS = (
    "bits, ewgs, ewgs_delta, grad_scale, granularity, group_size, init, narrow_range, options, percentile, rule,"
    " signed, symmetric"
)


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
    recipe = QuantRecipe()
    assert (recipe.weight, recipe.activation, recipe.target) == (weight, activation, "onnxruntime")
    assert QuantSpec() == QuantSpec(8, True, True, "tensor", "lsq", False, "minmax", 99.99, "sample")


def test_a_spec_is_a_value():
    assert QuantSpec(bits=4) == QuantSpec(bits=4) != QuantSpec(bits=5)
    assert len({QuantSpec(bits=4), QuantSpec(bits=4), QuantSpec(bits=5)}) == 2
    with pytest.raises(AttributeError):
        QuantSpec().bits = 4  # type: ignore[misc]


def test_a_spec_reads_as_one_line():
    assert str(QuantSpec()) == "int8 symmetric per tensor"
    assert str(default_weight_spec()) == "int8 narrow symmetric per channel"
    assert str(QuantSpec(bits=4, signed=False, symmetric=False)) == "uint4 affine per tensor"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bits": 0}, "QuantSpec: bits must be a whole number from 1 to 16, got 0"),
        ({"bits": 17}, "QuantSpec: bits must be a whole number from 1 to 16, got 17"),
        ({"bits": 8.0}, "QuantSpec: bits must be a whole number from 1 to 16, got 8.0"),
        ({"bits": True}, "QuantSpec: bits must be a whole number from 1 to 16, got True"),
        ({"bits": "8"}, "QuantSpec: bits must be a whole number from 1 to 16, got '8'"),
        ({"percentile": 50}, "QuantSpec: percentile must be above 50 and at most 100, got 50"),
        ({"percentile": 100.1}, "QuantSpec: percentile must be above 50 and at most 100, got 100.1"),
        ({"percentile": float("nan")}, "QuantSpec: percentile must be above 50 and at most 100, got nan"),
        ({"percentile": "99"}, "QuantSpec: percentile must be above 50 and at most 100, got '99'"),
        ({"percentile": None}, "QuantSpec: percentile must be above 50 and at most 100, got None"),
        ({"granularity": "group"}, "QuantSpec: granularity='group' needs a group_size of at least 1, got None"),
        (
            {"granularity": "channel", "group_size": 8},
            "QuantSpec: group_size=8 has no effect with granularity='channel'; use granularity='group'",
        ),
        ({"ewgs_delta": -0.1}, "QuantSpec: ewgs_delta must be at least 0 and finite, got -0.1"),
        ({"options": 3}, "QuantSpec: options must be a mapping of names to values, got 3"),
        ({"granularity": "row"}, "QuantSpec: granularity must be one of tensor, channel, group, got 'row'"),
        ({"init": "max"}, "QuantSpec: init must be one of minmax, percentile, mse, lsq, got 'max'"),
        ({"grad_scale": 1.0}, "QuantSpec: grad_scale must be one of sample, batch, none, relative, got 1.0"),
        (
            {"signed": False, "narrow_range": True},
            "QuantSpec: narrow_range=True needs signed=True; an unsigned grid has no mirror image",
        ),
    ],
)
def test_a_wrong_spec_is_refused(wrong, sentence):
    with pytest.raises(ValueError) as refusal:
        QuantSpec(**wrong)
    assert str(refusal.value) == sentence


def test_the_ends_of_the_percentile_are_allowed():
    assert QuantSpec(percentile=100).percentile == 100 and QuantSpec(percentile=50.01).percentile == 50.01


def test_later_overrides_win_key_by_key():
    recipe = QuantRecipe(
        overrides={
            "layer?.*": {"weight": {"bits": 4, "init": "mse"}},
            "*.conv1": {"weight": {"bits": 3}, "activation": {"bits": 5}},
            "layer1.0.conv1": {"activation": {"init": "percentile"}},
        }
    )
    layer = recipe.for_layer("layer1.0.conv1")
    assert (layer.weight.bits, layer.weight.init, layer.weight.granularity) == (3, "mse", "channel")
    assert (layer.activation.bits, layer.activation.init, layer.activation.signed) == (5, "percentile", False)
    other = recipe.for_layer("layer1.0.conv2")
    assert (other.weight.bits, other.activation) == (4, recipe.activation)
    assert recipe.for_layer("fc").weight == recipe.weight and recipe.for_layer("fc").skipped_by is None


def test_patterns_are_shell_style_and_know_upper_case():
    recipe = QuantRecipe(overrides={"*.downsample.[0-1]": {"skip": True}, "Head": {"skip": True}})
    skipped = [name for name in ("layer2.0.downsample.0", "layer2.0.downsample.2", "head", "Head", "downsample.0")
               if recipe.for_layer(name).skipped_by]  # fmt: skip
    assert skipped == ["layer2.0.downsample.0", "Head"]


def test_a_skip_names_the_pattern_that_asked_for_it():
    recipe = QuantRecipe(
        overrides={
            "conv*": {"skip": True},
            "conv1": {"weight": {"bits": 4}},
            "conv2": {"skip": False},
            "conv3": {"skip": True},
        }
    )
    names = {name: recipe.for_layer(name).skipped_by for name in ("conv0", "conv1", "conv2", "conv3", "fc")}
    assert names == {"conv0": "conv*", "conv1": "conv*", "conv2": None, "conv3": "conv3", "fc": None}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"target": "tensorrt"}, "QuantRecipe: target must be one of onnxruntime, got 'tensorrt'"),
        (
            {"overrides": {"fc": {"weigth": {}}}},
            "QuantRecipe: overrides['fc']: unknown key 'weigth'; valid: weight, activation, skip",
        ),
        (
            {"overrides": {"fc": {"weight": {"bit": 4}}}},
            f"QuantRecipe: overrides['fc']['weight']: unknown key 'bit'; valid: {VALID_KEYS}",
        ),
        (
            {"activation": QuantSpec(granularity="channel")},
            "QuantRecipe: activation granularity 'channel' has no integer kernel in onnxruntime; use 'tensor'",
        ),
        (
            {"weight": QuantSpec(symmetric=False)},
            "QuantRecipe: an affine weight has no exact BatchNorm folding; use symmetric=True",
        ),
        (
            {"overrides": {"fc": {"weight": {"symmetric": False}}}},
            "QuantRecipe: overrides['fc']: an affine weight has no exact BatchNorm folding; use symmetric=True",
        ),
        (
            {"overrides": {"fc": {"activation": {"granularity": "channel"}}}},
            "QuantRecipe: overrides['fc']: activation granularity 'channel' has no integer kernel in onnxruntime;"
            " use 'tensor'",
        ),
    ],
)
def test_a_wrong_recipe_is_refused(wrong, sentence):
    with pytest.raises(ValueError) as refusal:
        QuantRecipe(**wrong)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"weight": {"bits": 33}},
            "QuantRecipe: overrides['fc']['weight']: QuantSpec: bits must be a whole number from 1 to 16, got 33",
        ),
        (None, "QuantRecipe: overrides['fc']: must be a mapping, got None"),
        ({"weight": None}, "QuantRecipe: overrides['fc']['weight']: must be a mapping, got None"),
        ({"weight": "int8"}, "QuantRecipe: overrides['fc']['weight']: must be a mapping, got 'int8'"),
    ],
)
def test_a_wrong_value_in_an_override_says_where(change, sentence):
    with pytest.raises(ValueError) as refusal:
        QuantRecipe(overrides={"fc": change})
    assert str(refusal.value) == sentence


def test_an_override_with_another_rule_or_granularity_drops_what_belonged_to_the_old_one():
    grouped = QuantSpec(bits=4, granularity="group", group_size=8, rule="dsq", options={"alpha": 0.3})
    recipe = QuantRecipe(
        weight=grouped,
        overrides={
            "rule": {"weight": {"rule": "lsq"}},
            "same": {"weight": {"rule": "dsq", "bits": 8}},
            "coarse": {"weight": {"granularity": "channel"}},
            "both": {"weight": {"granularity": "tensor", "rule": "dsq", "options": {"alpha": 0.5}}},
        },
    )
    assert recipe.for_layer("rule").weight == replace(grouped, rule="lsq", options={})
    assert recipe.for_layer("same").weight == replace(grouped, bits=8)
    assert recipe.for_layer("coarse").weight == replace(grouped, granularity="channel", group_size=None)
    assert recipe.for_layer("both").weight == QuantSpec(bits=4, rule="dsq", options={"alpha": 0.5})
