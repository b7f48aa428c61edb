"""max_magnitude: every rule respects or refuses it; a target and an override pass it to the layers."""

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import qat
from qat.export.checks import keeps_to_its_grid
from qat.layers import QuantLayer
from qat.quantizer import create_quantizer, registered_quantizers
from qat.spec import QuantSpec
from qat.targets import PROFILES
from tests.references.rule_specs import plain

X86 = PROFILES["onnxruntime_x86"]


def spec_of(rule: str) -> QuantSpec | None:
    """A grid of this rule that max_magnitude=5 narrows; None if the rule's grid is narrower."""
    for bits, signed, symmetric in itertools.product((8, 4, 2, 1), (True, False), (True, False)):
        spec = plain(bits=bits, signed=signed, symmetric=symmetric, rule=rule)
        with contextlib.suppress(ValueError):
            create_quantizer(spec, "weight")
            return spec if bits > 2 else None
    return None


@pytest.mark.parametrize("rule", registered_quantizers())
def test_a_rule_keeps_to_the_magnitude_or_refuses_it(rule: str) -> None:
    spec = spec_of(rule)
    if spec is None:  # one or two bits, or activations only, which refuse below
        return
    limited = replace(spec, max_magnitude=5)
    try:
        quantizer = create_quantizer(limited, "weight")
    except ValueError as error:
        assert f"rule {rule!r} " in str(error) and "max_magnitude=5" in str(error)
        return
    x = torch.linspace(-3, 3, 200).reshape(10, 20)
    quantizer.fit(x.reshape(1, -1))
    quantizer.eval()
    low, high = quantizer.bounds()
    assert max(-low, high) == 5
    codes = quantizer.codes(x)
    assert codes.abs().max() <= 5 and keeps_to_its_grid(quantizer, x)


def test_pact_refuses_it_for_activations() -> None:
    with pytest.raises(ValueError, match=r"^rule 'pact' has the integers of its 8 bits and cannot keep to max_magnitu"):
        create_quantizer(QuantSpec(signed=False, rule="pact", max_magnitude=100), "activation")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def largest_integers(model: nn.Module) -> dict[str, float]:
    return {
        name: float(layer.weight_quantizer.codes(layer.weight).detach().abs().max())
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLayer)
    }


def test_as_a_target_and_as_an_override() -> None:
    x = torch.randn(8, 3, 8, 8)
    for recipe, expected in (
        (qat.QuantRecipe(target="onnxruntime_x86"), {"0": 64.0, "4": 64.0}),
        (qat.QuantRecipe(overrides={"type:Linear": {"weight": {"max_magnitude": 64}}}), {"0": 127.0, "4": 64.0}),
        (qat.QuantRecipe(target="onnxruntime_x86", last_bits=4), {"0": 64.0, "4": 7.0}),
    ):
        model = qat.prepare(net(), recipe)
        qat.calibrate(model, [x])
        assert largest_integers(model) == expected
        table = qat.summary(model)
        assert table.count("int8 in -64..64 symmetric per channel") == list(expected.values()).count(64.0)


@pytest.mark.parametrize(
    ("recipe", "facts"),
    [
        ({"weight": QuantSpec(max_magnitude=127)}, ("a weight down to -127", "use max_magnitude=64")),
        ({"overrides": {"fc": {"weight": {"max_magnitude": None}}}}, ("overrides['fc']: a weight down to -127",)),
        ({"activation": QuantSpec(signed=True)}, ("a signed activation", "use signed=False")),
    ],
)
def test_what_may_saturate_is_refused_by_the_target(recipe: dict[str, Any], facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:
        qat.QuantRecipe(target="onnxruntime_x86", **recipe)
    assert all(fact in str(refusal.value) for fact in ("QuantRecipe: ", "onnxruntime_x86", *facts))


def test_the_largest_sum_of_two_products_fits_16_bits() -> None:
    highest = X86.activation.qmax
    assert highest * 2 * X86.weight.qmax < 2**15 <= highest * 2 * (X86.weight.qmax + 1)
    assert -highest * 2 * X86.weight.qmin < 2**15
