"""Calibration warns of a rule that destroys what it quantizes, and of no other."""

import warnings

import pytest
import torch
from torch import nn

import qat
from tests.references import rule_specs


def calibrated(weight: dict[str, object], mean: float = 0.02) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(144, 32)
    with torch.no_grad():
        layer.weight.normal_(std=0.02).add_(torch.randn(32, 1) * mean)
    net, x = nn.Sequential(layer, nn.ReLU(), nn.Linear(32, 8)), torch.randn(64, 144)
    model = qat.prepare(net, qat.QuantRecipe(weight), x)
    qat.calibrate(model, [x])


@pytest.mark.parametrize("bits", [5, 8])
def test_a_rule_that_takes_the_means_away_is_warned_of(bits: int) -> None:
    said = r"^calibrate: the rule 'apot' keeps \d+ dB of the weight of '0', where . bits .*\{'normalize': True\}"
    with pytest.warns(UserWarning, match=said):
        calibrated({"rule": "apot", "bits": bits, "options": {"normalize": True}})


KEEPING = [
    name for name, spec in rule_specs.WEIGHTS.items()
    if spec.symmetric and not spec.options.get("normalize") and spec.options.get("rescale") is not False
]  # fmt: skip
"""The rules that do not change weights on purpose."""


@pytest.mark.parametrize("mean", [0.0, 0.02])
@pytest.mark.parametrize("name", KEEPING)
def test_no_rule_is_warned_of_for_what_its_bits_cannot_hold(name: str, mean: float) -> None:
    spec = rule_specs.WEIGHTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(spec, mean)
