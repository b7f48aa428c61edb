"""What a rule refuses, naming the rule, the value, and what would be right; and the rules that calibration warns of."""

import dataclasses
import math
import warnings
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.quantizer import create_quantizer
from qat.quantizer.registry import quantizer_class
from qat.spec import QuantSpec, Role
from tests.references import rule_specs as specs
from tests.references.prepared_case import refused
from tests.references.rule_specs import AFFINE_WEIGHT, EWGS, GROUPS, SIGNED, TENSOR, activation, weight

NAN, INF = math.nan, math.inf

# (rule, options, what the sentence names)
WRONG_OPTIONS = [
    ("ema", {"momentun": 0.1}, "unknown option 'momentun'; did you mean 'momentum'?"),
    ("ema", {"rate": 0.1}, "unknown option 'rate'; it takes momentum"),
    ("lsq", {"alpha": 1.0}, "unknown option 'alpha'; it takes none"),
    ("ema", {"momentum": "0.1"}, "momentum must be a number, got '0.1'"),
    ("ema", {"momentum": True}, "momentum must be a number, got True"),
    ("apot", {"normalize": 1}, "normalize must be true or false, got 1"),
    ("binary", {"gradient": 1}, "gradient must be one of clipped, approximate, error_decay, straight_through, got 1"),
    ("mxfp8", {"block_size": 32.0}, "block_size must be a whole number, got 32.0"),
    ("binary", {"gradient": "aproximate"}, "one of clipped, approximate, error_decay, straight_through"),
    ("mxfp8", {"format": "e2m1"}, "one of e4m3, e5m2, got 'e2m1'"),
    ("mxfp6", {"format": "e4m3"}, "one of e2m3, e3m2, got 'e4m3'"),
    ("mxfp4", {"format": "int8"}, "one of e2m1, got 'int8'"),
    ("mxint8", {"format": "e4m3"}, "one of int8, got 'e4m3'"),
    *(("ema", {"momentum": wrong}, f"above 0 and at most 1, got {wrong}") for wrong in (0, 1.5, NAN)),
    *(("pact", {"alpha_decay": wrong}, f"at least 0 and finite, got {wrong}") for wrong in (-1e-4, INF)),
    *(("ttq", {"threshold": wrong}, f"from 0 to below 1, got {wrong}") for wrong in (1, -0.1)),
    *(("dsq", {"alpha": wrong}, f"above 0 and below 1, got {wrong}") for wrong in (1.0, 0)),
    *(("learned_bits", {"least": wrong}, f"from 1 to 16, got {wrong}") for wrong in (0, 17)),
    *(("learned_bits", {"cost": wrong}, f"at least 0 and finite, got {wrong}") for wrong in (-1.0, NAN)),
    ("stacked_sigmoid", {"start": 0.0}, "0 < start <= end, got start=0.0 and end=100.0"),
    ("stacked_sigmoid", {"end": 1}, "0 < start <= end, got start=5.0 and end=1"),
    ("stacked_sigmoid", {"end": INF}, "0 < start <= end, got start=5.0 and end=inf"),
    ("mxfp8", {"block_size": 0}, "'block_size' must be at least 1, got 0"),
]


def test_wrong_options_are_refused():
    for rule, wrong, fact in WRONG_OPTIONS:
        role, spec = next(row for row in specs.QUANTIZERS.values() if row[1].rule == rule)
        with pytest.raises(ValueError) as refusal:
            specs.new(role, dataclasses.replace(spec, options=wrong))
        assert str(refusal.value).startswith(f"rule {rule!r}: ") and fact in str(refusal.value)


def traces_of(role: Role, spec: QuantSpec) -> dict[str, Tensor]:
    """What a step of training and the end of it show of a quantizer: values, gradients, state."""
    quantizer = specs.fitted(role, spec)
    quantizer.set_progress(0.5)
    x = specs.tensor_of(role, spec, seed=1).mul(1.5).requires_grad_()
    y = quantizer(x)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) + 0.2
    ((y * weights).sum() + qat.penalty(quantizer)).backward()
    traces = {"y": y, "dx": x.grad, **{f"d{name}": each.grad for name, each in quantizer.named_parameters()}}
    traces |= dict(quantizer.state_dict())
    with torch.no_grad():
        for name, each in quantizer.named_parameters():
            each.fill_(0.0 if name == "bits" else 1.0)
    return {name: each.detach().clone() for name, each in {**traces, "after": quantizer(x)}.items()}


def others(options_type: Any, name: str) -> list[Any]:
    """Values of an option that are not its default."""
    default = next(each.default for each in dataclasses.fields(options_type) if each.name == name)
    if choices := get_args(get_type_hints(options_type)[name]):
        return [each for each in choices if each != default]
    if isinstance(default, bool):
        return [not default]
    return [(default + 1 if default < 8 else 2) if isinstance(default, int) else default / 2]


ROLES_OF_RULES = {(role, spec.rule): spec for role, spec in reversed(specs.QUANTIZERS.values())}


@pytest.mark.parametrize(("role", "rule"), ROLES_OF_RULES)
def test_every_option_of_every_rule_acts_or_is_refused(role: Role, rule: str) -> None:
    """Point 57: some were taken and ignored."""
    spec = dataclasses.replace(ROLES_OF_RULES[role, rule], options={}, grad_scale="sample")
    options_type = quantizer_class(rule).options_type
    changes = [{"options": {each.name: value}} for each in dataclasses.fields(options_type)
               for value in others(options_type, each.name)]  # fmt: skip
    usual = traces_of(role, spec)
    for change in [*changes, {"grad_scale": "none"}, {"grad_scale": "relative"}]:
        try:
            found = traces_of(role, dataclasses.replace(spec, **change))
        except ValueError as refusal:
            assert f"rule {rule!r}" in str(refusal), change
        else:
            assert any(not torch.equal(usual[name], each) for name, each in found.items()), change


def test_what_is_learned_has_the_factor_unless_it_decays() -> None:
    """Point 57: without it ttq's levels rise per tensor under SGD before they learn."""
    assert weight("ttq", 2).grad_scale == activation("lsq").grad_scale == "sample"
    pact = activation("pact")
    assert pact.grad_scale == "none" and pact.changed({"rule": "lsq"}).grad_scale == "sample"
    x = specs.tensor_of("weight", weight("lsq"))
    for spec in (weight("ttq", 2, TENSOR), weight("apot", 4, TENSOR)):
        plain, scaled = (traces_of("weight", spec.changed({"grad_scale": each})) for each in ("none", "sample"))
        for name, gradient in plain.items():
            if name[0] == "d" and name != "dx":
                torch.testing.assert_close(scaled[name], gradient / math.sqrt(x.numel() * spec.qmax))


UNSIGNED_WEIGHT = {"signed": False, "narrow_range": False, "symmetric": False}
NOT_UNIFORM = (
    "dorefa", "apot", "binary", "ternary", "ttq", "n2uq", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp6", "mxfp4", "mxint8",
)  # fmt: skip
WRONG_SPECS = [
    # the wrong kind of tensor
    ("activation", activation("ternary", 2, SIGNED), "for weights only"),
    ("activation", activation("ttq", 2, SIGNED), "for weights only"),
    ("weight", weight("pact", 4, UNSIGNED_WEIGHT), "for activations only"),
    # the wrong number of bits
    ("activation", activation("lsq", 1, SIGNED), "at least 2 bits, got bits=1"),
    ("weight", weight("dsq", 1), "at least 2 bits, got bits=1"),
    *(
        ("weight", weight(rule, wrong), f"has {bits} bit{'s' * (bits > 1)}; set bits={bits}, got {wrong}")
        for rule, bits, wrong in (
            ("binary", 1, 2), ("ternary", 2, 3), ("ttq", 2, 8), ("fp8_e4m3", 8, 4), ("fp8_e5m2", 8, 16),
            ("mxfp8", 8, 4), ("mxfp6", 6, 8), ("mxfp4", 4, 8), ("mxint8", 8, 6),
        )
    ),
    ("weight", weight("apot", 1), "2 to 9 bits with signed=True, got bits=1"),
    ("weight", weight("apot", 10), "2 to 9 bits with signed=True, got bits=10"),
    ("activation", activation("apot", 9, specs.FROM_ZERO), "1 to 8 bits with signed=False, got bits=9"),
    ("weight", weight("n2uq", 9, TENSOR), "at most 8 bits, got bits=9"),
    ("weight", weight("learned_bits", 4, least=5), "'least' is 5, more than the 4 bits"),
    ("activation", activation("learned_bits", 1, specs.FROM_ZERO), "'least' is 2, more than the 1 bits"),
    # the wrong sign or symmetry
    ("activation", activation("lsq_plus", 8, SIGNED), "symmetric=False"),
    ("activation", activation("pact", 8, SIGNED), "signed=False"),
    ("activation", activation("dorefa", 8, SIGNED), "signed=False"),
    ("weight", weight("dorefa", 4, AFFINE_WEIGHT), "signed=True, symmetric=True"),
    ("weight", weight("apot", 4, AFFINE_WEIGHT), "symmetric=True"),
    ("activation", activation("binary", 1), "signed=True and symmetric=True"),
    ("weight", weight("ternary", 2, AFFINE_WEIGHT), "signed=True and symmetric=True"),
    ("weight", weight("n2uq", 4), "symmetric=True and granularity='tensor'"),
    ("activation", activation("n2uq", 4), "symmetric=True and granularity='tensor'"),
    ("activation", activation("fp8_e4m3"), "signed=True and symmetric=True"),
    ("activation", activation("mxfp4", 4), "signed=True and symmetric=True"),
    ("activation", activation("learned_bits"), "symmetric=True"),
    # granularity, start and EWGS
    ("weight", weight("mxfp8", 8, GROUPS), "'block_size'"),
    ("weight", weight("minmax", 8, {"init": "mse"}), "init='mse' has no effect"),
    *(("weight", dataclasses.replace(specs.WEIGHTS[rule], **EWGS), "ewgs='fixed'") for rule in NOT_UNIFORM),
    ("activation", dataclasses.replace(specs.ACTIVATIONS["n2uq"], ewgs="hessian"), "ewgs='hessian'"),
]  # fmt: skip


@pytest.mark.parametrize(("role", "spec", "fact"), WRONG_SPECS, ids=lambda each: getattr(each, "rule", None))
def test_a_grid_that_a_rule_cannot_have_is_refused(role, spec, fact):
    with pytest.raises(ValueError, match=spec.rule) as refusal:
        specs.new(role, spec)
    assert fact in str(refusal.value)


@pytest.mark.parametrize("change", [{"granularity": "channel"}, GROUPS])
def test_a_layer_refuses_scales_that_its_input_cannot_have(change):
    with refused(f"activation_spec: granularity {change['granularity']!r} is for weights; use granularity='tensor'"):
        qat.QuantLinear(8, 3, activation_spec=activation("lsq", 8, change))


def test_negative_values_on_a_grid_without_them_are_refused():
    x = torch.tensor([[-1.25, 2.0]])
    for spec in (activation("lsq", 8, specs.FROM_ZERO), activation("learned_bits", 8, specs.FROM_ZERO)):
        model = nn.Sequential(create_quantizer(spec))
        said = r"^calibrate: quantizer '0': values down to -1.25, which its grid \(uint8 symmetric per tensor\) cannot"
        with pytest.raises(ValueError, match=f"{said} hold; use signed=True or symmetric=False$"):
            qat.calibrate(model, [x])


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
    name for name, spec in specs.WEIGHTS.items()
    if spec.symmetric and not spec.options.get("normalize") and spec.options.get("rescale") is not False
]  # fmt: skip
"""The rules that do not change weights on purpose."""


@pytest.mark.parametrize("mean", [0.0, 0.02])
@pytest.mark.parametrize("name", KEEPING)
def test_no_rule_is_warned_of_for_what_its_bits_cannot_hold(name: str, mean: float) -> None:
    spec = specs.WEIGHTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(spec, mean)
