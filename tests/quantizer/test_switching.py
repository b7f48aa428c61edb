"""The two switches of a quantizer, for every rule: off, its tensor passes; frozen, its range stays. Both are saved."""

import pytest
import torch
from torch import nn

from qat import QuantLinear, QuantSpec, calibrate, freeze_scales
from qat.quantizer import Quantizer
from qat.quantizer.base import Role
from tests.references.rule_specs import every_quantizer, fitted, tensor_of


@every_quantizer
def test_what_is_off_passes_and_what_is_frozen_keeps_its_state(role: Role, spec: QuantSpec) -> None:
    quantizer, x = fitted(role, spec), tensor_of(role, spec)
    assert not torch.equal(quantizer(x), x)
    quantizer.is_disabled = True
    assert quantizer(x) is x and quantizer.eval()(x) is x and not quantizer.has_integers
    quantizer.train().is_disabled = False

    quantizer(x)  # a minmax weight has seen this one last
    quantizer.freeze()
    before = {name: value.clone() for name, value in quantizer.state_dict().items()}
    wider = (3 * tensor_of(role, spec, seed=1)).requires_grad_()
    quantizer(wider).square().sum().backward()
    assert wider.grad is not None and all(parameter.grad is None for parameter in quantizer.parameters())
    assert before.pop("frozen") and all(torch.equal(quantizer.state_dict()[name], old) for name, old in before.items())


@pytest.mark.parametrize("rule", ["minmax", "ema"])
def test_frozen_observed_ranges_hold_in_evaluation_and_after_loading(rule: str) -> None:
    spec = QuantSpec(rule=rule, granularity="channel")
    quantizer, x = fitted("weight", spec, torch.randn(6, 8)), torch.randn(6, 8)
    quantizer(x)
    grid = [part.clone() for part in quantizer.grid(x)]
    quantizer.freeze()
    other = fitted("weight", spec, torch.randn(6, 8))
    other.load_state_dict(quantizer.state_dict())
    for each in (quantizer, other, quantizer.eval(), other.eval()):
        each(2 * x)
        assert all(torch.equal(now, then) for now, then in zip(each.grid(2 * x), grid, strict=True))
    quantizer.train().freeze(False)
    quantizer(2 * x)
    assert not torch.equal(quantizer.grid(2 * x)[0], grid[0])


def test_the_state_has_the_switches_only_while_they_are_set() -> None:
    layer = QuantLinear(4, 2)
    calibrate(layer, [torch.randn(8, 4)])
    plain = layer.state_dict()
    layer.input_quantizer.is_disabled = True
    freeze_scales(layer)
    switched = layer.state_dict()
    assert switched.keys() - plain.keys() == {
        "input_quantizer.disabled", "input_quantizer.frozen", "weight_quantizer.frozen"
    }  # fmt: skip

    other = QuantLinear(4, 2)
    other.load_state_dict(switched)
    assert switches(other) == {"input_quantizer": (True, True), "weight_quantizer": (False, True)}
    assert [name for name, p in other.named_parameters() if p.requires_grad] == ["weight", "bias"]
    other.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, strict=False)  # of a float layer
    assert switches(other) == switches(layer)
    other.load_state_dict(plain)  # as an older version wrote it, or before the switches
    assert set(switches(other).values()) == {(False, False)}
    assert all(p.requires_grad for p in other.parameters())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*frozen"):
        nn.Linear(4, 2).load_state_dict(switched)


def test_loading_does_not_touch_what_was_frozen_by_hand() -> None:
    layer = QuantLinear(4, 2)
    layer.input_quantizer.requires_grad_(False)
    layer.load_state_dict(layer.state_dict())
    assert not layer.input_quantizer.scale.requires_grad


def switches(model: nn.Module) -> dict[str, tuple[bool, bool]]:
    return {
        name: (each.is_disabled, each.is_frozen) for name, each in model.named_modules() if isinstance(each, Quantizer)
    }
