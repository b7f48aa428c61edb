"""Recipes: the target's defaults, overrides by name and type, first and last layer, and every error message."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from qat.recipe import QuantRecipe
from qat.spec import QuantSpec
from qat.targets import PROFILES
from tests.references.prepared_case import refused


def test_later_overrides_win_key_by_key():
    recipe = QuantRecipe(overrides={"layer?.*": {"weight": {"bits": 4, "init": "mse"}},
                                    "*.conv1": {"weight": {"bits": 3}, "activation": {"bits": 5}},
                                    "layer1.0.conv1": {"activation": {"init": "percentile"}}})  # fmt: skip
    layer = recipe.for_layer("layer1.0.conv1")
    assert (layer.weight.bits, layer.weight.init, layer.weight.granularity) == (3, "mse", "channel")
    assert (layer.activation.bits, layer.activation.init, layer.activation.signed) == (5, "percentile", False)
    other = recipe.for_layer("layer1.0.conv2")
    assert (other.weight.bits, other.activation) == (4, recipe.activation)
    assert recipe.for_layer("fc").weight == recipe.weight and recipe.for_layer("fc").skipped_by is None


def test_a_skip_names_the_pattern_that_asked_for_it():
    overrides = {"conv*": {"skip": True}, "conv1": {"weight": {"bits": 4}}, "conv2": {"skip": False}}
    recipe = QuantRecipe(overrides={**overrides, "conv3": {"skip": True}})
    names = {name: recipe.for_layer(name).skipped_by for name in ("conv0", "conv1", "conv2", "conv3", "fc")}
    assert names == {"conv0": "conv*", "conv1": "conv*", "conv2": None, "conv3": "conv3", "fc": None}


# A recipe's arguments that are refused, and what is said behind "QuantRecipe: ".
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"weight": {"bit": 4}}, "weight: unknown key 'bit'; did you mean 'bits'?"),
    ({"activation": {"bits": 33}}, "activation: QuantSpec: bits must be a whole number from 1 to 16, got 33"),
    ({"target": ["qnnpack"]},
     f"unknown target ['qnnpack']; registered: {', '.join(PROFILES)}; did you mean 'qnnpack'?"),
    ({"first_bits": 0}, "first_bits must be a whole number from 1 to 16 or None, got 0"),
    ({"last_bits": True}, "last_bits must be a whole number from 1 to 16 or None, got True"),
    ({"residual_bits": 2.5}, "residual_bits must be a whole number from 1 to 16 or None, got 2.5"),
    ({"overrides": {"type:": {}}}, "overrides['type:']: the class is missing; write 'type:Linear'"),
    ({"overrides": {"type:Linear": {}, nn.Linear: {"skip": True}}},
     "overrides: a class and 'type:Linear' say the same; keep one of them"),
    ({"overrides": {nn.Linear: {"bits": 4}}},
     "overrides['type:Linear']: unknown key 'bits'; valid: weight, activation, skip"),
    ({"overrides": {"fc": {"weight": {"bit": 4}}}},
     "overrides['fc']['weight']: unknown key 'bit'; did you mean 'bits'?"),
    ({"overrides": {"fc": {"weight": {"bits": 33}}}},
     "overrides['fc']['weight']: QuantSpec: bits must be a whole number from 1 to 16, got 33"),
    ({"overrides": {"fc": None}}, "overrides['fc']: must be a mapping, got None"),
    ({"overrides": {"fc": {"weight": "int8"}}}, "overrides['fc']: weight must be a mapping, got 'int8'"),
    # Point 56: values of the wrong type, which were taken in silence, or ended in a raw error.
    ({"overrides": {"fc": {"skip": "no"}}}, "overrides['fc']: skip must be true or false, got 'no'"),
    ({"overrides": {"fc": {"weight": {"bits": "4"}}}},
     "overrides['fc']['weight']: QuantSpec: bits must be a whole number, got '4'"),
    ({"weight": {"symmetric": "yes"}}, "weight: QuantSpec: symmetric must be true or false, got 'yes'"),
    # Grids that the target does not run.
    ({"overrides": {"fc": {"activation": {"granularity": "channel"}}}},
     "overrides['fc']: activation granularity 'channel' has no integer kernel in onnxruntime; use 'tensor'"),
    ({"target": "tensorrt", "weight": QuantSpec(symmetric=False, rule="lsq_plus")},
     "an affine weight has no exact BatchNorm folding; use symmetric=True and rule='lsq'"),
    ({"target": "integer_only", "first_bits": 12},
     "first_bits: an activation of 12 bits does not run on integer_only: activations are int8; use at most 8 bits"),
    # Values of the wrong type.
    ({"weight": 8}, "weight must be a QuantSpec, a mapping of its fields or None, got 8"),
    ({"overrides": ["fc"]}, "overrides must be a mapping, got ['fc']"),
    ({"overrides": {3: {}}}, "overrides: a key is a pattern of names or a class of layers, got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_a_wrong_recipe_is_refused(wrong, sentence):
    with refused(f"QuantRecipe: {sentence}", (ValueError, TypeError)):
        QuantRecipe(**wrong)


def test_residual_bits_are_at_least_eight_on_the_targets_grid():
    for given, bits in (({"bits": 2, "rule": "pact"}, 8), ({"bits": 8}, 8), ({"bits": 16}, 16)):
        recipe = QuantRecipe(activation=given)
        assert recipe.residual.bits == bits and (recipe.residual.rule == "lsq" or recipe.residual == recipe.activation)
    assert QuantRecipe(activation={"bits": 2}, residual_bits=2).residual.bits == 2


def test_first_and_last_layer_have_bits_of_their_own():
    recipe = QuantRecipe(weight=QuantSpec(bits=4, granularity="channel", init="mse"),
                         activation=QuantSpec(bits=3, signed=False, symmetric=False, init="percentile"), first_bits=8,
                         last_bits=6)  # fmt: skip
    found = {position: recipe.for_layer("any", nn.Conv2d, position) for position in (None, "first", "last")}
    bits = {position: (layer.weight.bits, layer.activation.bits) for position, layer in found.items()}
    assert bits == {None: (4, 3), "first": (8, 8), "last": (6, 6)}
    assert found["first"].weight == replace(recipe.weight, bits=8)
    assert found["last"].activation == replace(recipe.activation, bits=6)
    assert QuantRecipe(recipe.weight, first_bits=8).for_layer("fc", position="last").weight.bits == 4


def test_overrides_win_over_first_and_last_bits():
    recipe = QuantRecipe(first_bits=6, last_bits=6, overrides={"stem": {"weight": {"bits": 4}}, "head": {"skip": True}})
    first, last = recipe.for_layer("stem", position="first"), recipe.for_layer("head", position="last")
    assert (first.weight.bits, first.activation.bits, first.skipped_by) == (4, 6, None)
    assert (last.weight.bits, last.skipped_by) == (6, "head")


def test_overrides_by_type_and_by_name_win_in_their_order():
    changes = {"type:Linear": {"weight": {"bits": 4}}, "head": {"weight": {"bits": 6}}}
    by_name_last = QuantRecipe(overrides=changes)
    by_type_last = QuantRecipe(overrides=dict(reversed(changes.items())))
    assert by_name_last.for_layer("head", nn.Linear).weight.bits == 6
    assert by_type_last.for_layer("head", nn.Linear).weight.bits == 4
    for recipe in (by_name_last, by_type_last):
        assert recipe.for_layer("mlp.0", nn.Linear).weight.bits == 4
        assert recipe.for_layer("head", nn.Conv2d).weight.bits == 6
        assert recipe.for_layer("mlp.0", nn.Conv2d).weight.bits == 8
        assert recipe.for_layer("mlp.0").weight.bits == 8  # without a class only names match


def test_a_class_as_a_key_is_written_out_and_keeps_its_place():
    overrides = {"a": {"skip": True}, nn.Conv2d: {"skip": False}, "b": {"skip": True}}
    recipe = QuantRecipe(overrides=overrides)
    assert list(recipe.overrides) == ["a", "type:Conv2d", "b"]
    assert list(overrides) == ["a", nn.Conv2d, "b"]  # the user's own mapping stays as it is
    skipped = [recipe.for_layer(name, nn.Conv2d).skipped_by for name in ("a", "b")]
    assert skipped == [None, "b"]
    assert QuantRecipe(overrides={nn.Conv2d: {"skip": True}}).for_layer("c", nn.Conv2d).skipped_by == "type:Conv2d"


@pytest.mark.parametrize(("pattern", "name", "kind", "fits"), [
    ("layer1.*", "layer1.0.conv1", None, True),
    ("layer1", "layer1.0", nn.Conv2d, True),
    ("type:Conv2d", "layer1.0", nn.Conv2d, True),
    ("type:Conv2d", "layer1.0", nn.Conv1d, False),
    ("type:Conv?d", "layer1.0", nn.Conv1d, True),
    ("type:conv2d", "layer1.0", nn.Conv2d, False),
    ("type:Conv2d", "layer1.0", None, False),
    ("Head", "head", None, False),
    ("*.downsample.[0-1]", "layer2.0.downsample.0", None, True),
    ("*.downsample.[0-1]", "layer2.0.downsample.2", None, False),
])  # fmt: skip
def test_what_a_key_fits(pattern, name, kind, fits):
    assert QuantRecipe.matches(pattern, name, kind) is fits
    layer = QuantRecipe(overrides={pattern: {"skip": True}}).for_layer(name, kind)
    assert layer.skipped_by == (pattern if fits else None)


@pytest.mark.parametrize("given", [QuantSpec, dict], ids=["a spec", "a mapping"])
@pytest.mark.parametrize(("target", "fields", "weight", "activation"), [
    ("onnxruntime", {"bits": 4}, "int4 narrow symmetric per channel", "uint4 affine per tensor"),
    ("tensorrt", {"bits": 4}, "int4 narrow symmetric per channel", "int4 symmetric per tensor"),
    ("onnxruntime_x86", {}, "int8 in -64..64 symmetric per channel", "uint8 affine per tensor"),
    ("onnxruntime", {"granularity": "tensor"}, "int8 narrow symmetric per tensor", "uint8 affine per tensor"),
    ("onnxruntime", {"signed": False}, "uint8 symmetric per channel", "uint8 affine per tensor"),
])  # fmt: skip
def test_the_target_chooses_what_is_left_open(given, target, fields, weight, activation):
    recipe = QuantRecipe(weight=given(**fields), activation=given(**fields), target=target)
    assert (str(recipe.weight), str(recipe.activation)) == (weight, activation)
    assert (recipe.weight.init, recipe.activation.init) == ("mse" if fields.get("bits") == 4 else "minmax", "mse")
    layer = recipe.for_layer("fc")
    assert (layer.weight, layer.activation) == (recipe.weight, recipe.activation)
    assert recipe == QuantRecipe(recipe.weight, recipe.activation, target=target)  # completed once
