"""What optimizers, data and users may do to the rules: broken parameters, degenerate tensors, wrong specs."""

import dataclasses
import math

import pytest
import rule_specs as specs
import torch
from rule_specs import AFFINE_WEIGHT, EWGS, GROUPS, SIGNED, TENSOR, activation, every_quantizer, tensor_of, weight
from torch import nn

import qat
from qat.quantizer import create_quantizer, scale_shape

NAN, INF = math.nan, math.inf

# Broken parameters.

LEARNED = [
    (name, parameter)
    for name, (role, spec) in specs.QUANTIZERS.items()
    for parameter, _ in specs.new(role, spec).named_parameters()
]


@pytest.mark.parametrize(("name", "parameter"), LEARNED, ids=str)
def test_a_broken_parameter_leaves_everything_finite(name, parameter):
    for broken in (0.0, -3.0, NAN, INF, -INF):
        assert_finite_with(name, parameter, broken)


def assert_finite_with(name: str, parameter: str, broken: float) -> None:
    role, spec = specs.QUANTIZERS[name]
    quantizer = specs.fitted(role, spec)
    x = tensor_of(role, spec, seed=1).requires_grad_()
    for mode in (False, True):
        with torch.no_grad():
            getattr(quantizer, parameter).fill_(broken)
        quantizer.train(mode)
        y = quantizer(x)
        assert y.isfinite().all()
        if quantizer.has_integers:
            scale, zero_point = quantizer.grid(x)
            low, high = quantizer.bounds()
            codes = quantizer.codes(x)
            assert (scale > 0).all() and scale.isfinite().all()
            assert (low <= zero_point).all() and (zero_point <= high).all()
            assert (low <= codes).all() and (codes <= high).all()
        for positive in quantizer._positive:
            acts = quantizer.positive(positive)
            assert (acts > 0).all() and acts.isfinite().all()
    ((y - x.detach()).square().mean() + qat.penalty(quantizer)).backward()
    for tensor in (x, *quantizer.parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


def recovery_error(name: str, parameter: str, broken: float) -> tuple[float, float]:
    """Squared error of the calibrated quantizer, and the least on the way back from the broken parameter.

    Steps are a share of the calibrated value, shrinking, as a schedule's are. A NaN is put back at once, and so is an
    infinity, except where it means an end of the grid.
    """
    role, spec = specs.QUANTIZERS[name]
    x = tensor_of(role, spec)
    quantizer = specs.fitted(role, spec)
    healthy = (quantizer.eval()(x) - x).square().mean().item()
    sizes = {key: max(value.detach().abs().max().item(), 0.05) for key, value in quantizer.named_parameters()}
    with torch.no_grad():
        getattr(quantizer, parameter).fill_(broken * sizes[parameter])
    groups = [{"params": [value], "lr": 0.1 * sizes[key]} for key, value in quantizer.named_parameters()]
    optimizer = torch.optim.Adam(groups, betas=(0.5, 0.9))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    best = math.inf
    quantizer.train()
    at_once = math.isnan(broken) or (math.isinf(broken) and parameter not in ("zero_point", "bits"))
    for _ in range(10 if at_once else 120):
        optimizer.zero_grad()
        loss = (quantizer(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        best = min(best, loss.item())
    return healthy, best


RECOVERING = [
    "weight lsq, 2 bits", "weight lsq_plus", "weight power_of_two", "weight apot", "weight ttq", "weight dsq",
    "weight stacked_sigmoid", "weight fp8_e4m3", "weight learned_bits, groups", "activation lsq",
    "activation lsq_plus", "activation pact", "activation pact, from zero", "activation binary",
    "activation dsq, signed", "activation fp8_e5m2", "activation learned_bits, from zero",
]  # fmt: skip


@pytest.mark.parametrize("broken", [0.0, -0.5, NAN, INF, -INF])
@pytest.mark.parametrize(("name", "parameter"), [row for row in LEARNED if row[0] in RECOVERING], ids=str)
def test_a_loss_that_wants_it_back_brings_it_back(name, parameter, broken):
    healthy, best = recovery_error(name, parameter, broken)
    power = tensor_of(*specs.QUANTIZERS[name]).square().mean().item()
    assert best <= 2 * healthy + 0.005 * power


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("parameter", ["start", "widths", "step"])
@pytest.mark.parametrize("name", ["weight n2uq", "activation n2uq, from zero"])
def test_n2uq_comes_back_from_what_is_no_number(name, parameter, broken):
    """Beyond its outermost thresholds the published gradient of the thresholds is 0: a finite start stays lost."""
    healthy, best = recovery_error(name, parameter, broken)
    assert best <= 2 * healthy


# Degenerate tensors.


@pytest.mark.parametrize("spec", specs.WEIGHTS.values(), ids=specs.WEIGHTS.keys())
def test_channels_of_zeros_and_of_one_value(spec):
    torch.manual_seed(0)
    layer = qat.QuantLinear(8, 5, weight_spec=spec, activation_spec=activation("lsq", 8))
    x = torch.randn(30, 8)
    with torch.no_grad():
        layer.weight[0] = 0.0
        layer.weight[1] = 0.25
        layer.weight[2, :4] = 0.0
    layer.calibrate_weight()
    qat.calibrate(layer, [x])
    for mode in (True, False):
        layer.train(mode).zero_grad()
        y = layer(x)
        assert y.isfinite().all()
        y.sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters() if parameter.grad is not None)
    w = layer.weight_quantizer(layer.weight)
    if spec.rule not in ("dorefa", "binary") or (spec.bits == 1 and spec.granularity != "tensor"):
        assert (w[0] == 0).all() and torch.allclose(y[:, 0], layer.bias[0], rtol=1e-5)
    levels_of_its_own = spec.rule in ("dorefa", "apot", "ternary") or spec.rule.startswith("mx") or spec.init == "lsq"
    if spec.granularity != "tensor" and not levels_of_its_own:
        torch.testing.assert_close(w[1], torch.full((8,), 0.25), rtol=0.04, atol=0)


@every_quantizer
def test_a_tensor_of_zeros_can_be_calibrated_on(role, spec):
    quantizer = specs.fitted(role, spec, torch.zeros(6, 8, 3, 3))
    for mode in (True, False):
        assert quantizer.train(mode)(torch.zeros(6, 8, 3, 3)).isfinite().all()
        assert quantizer(tensor_of(role, spec)).isfinite().all()


@every_quantizer
def test_a_constant_tensor(role, spec):
    x = torch.full((6, 8, 3, 3), 0.7)
    quantizer = specs.fitted(role, spec, x).eval()
    y = quantizer(x)
    assert y.isfinite().all() and len(y.unique()) == 1
    if spec.rule in ("dorefa", "apot", "power_of_two", "mxfp4") or spec.bits < 3:
        return  # levels of their own
    assert y[0, 0, 0, 0].item() == pytest.approx(0.7, rel=0.13 if spec.rule[:2] in ("mx", "fp") else 0.07)


ALONE = {name: spec for name, spec in specs.WEIGHTS.items() if spec.granularity == "group"}


@pytest.mark.parametrize("spec", ALONE.values(), ids=ALONE.keys())
def test_groups_of_one_element(spec):
    spec = dataclasses.replace(spec, group_size=1)
    torch.manual_seed(0)
    w = torch.randn(4, 3)
    w[0, 0] = 0.0
    quantizer = specs.fitted("weight", spec, w)
    y = quantizer(w.requires_grad_())
    assert y.shape == (4, 3) and y.isfinite().all()
    y.square().sum().backward()
    assert w.grad.isfinite().all() and all(
        p.grad.isfinite().all() for p in quantizer.parameters() if p.grad is not None
    )
    if spec.rule == "apot":
        assert (y == 0).all()  # an element less its own mean
    elif spec.rule not in ("dorefa", "power_of_two"):
        torch.testing.assert_close(y, w, rtol=0.08, atol=0)  # every element is its scale's largest


@pytest.mark.parametrize("spec", ALONE.values(), ids=ALONE.keys())
def test_a_group_size_that_does_not_divide_is_refused(spec):
    spec = dataclasses.replace(spec, group_size=5)
    sentence = "group_size=5 does not divide the weight's 8 inputs; use 1, 2, 4, 8"
    for make in (
        lambda: qat.QuantLinear(8, 3, weight_spec=spec),
        lambda: qat.QuantConv2d(8, 3, 3, weight_spec=spec),
        lambda: create_quantizer(spec, "weight", scale_shape(spec, (6, 8))),
    ):
        with pytest.raises(ValueError) as refusal:
            make()
        assert str(refusal.value) == sentence
    with pytest.raises(ValueError) as refusal:
        qat.prepare(nn.Sequential(nn.Conv2d(5, 8, 1), nn.Conv2d(8, 8, 1)), qat.QuantRecipe(weight=spec))
    assert str(refusal.value) == f"prepare: 1 (weight): {sentence}"


@every_quantizer
def test_an_empty_batch_passes(role, spec):
    if role == "weight":
        layer = qat.QuantLinear(8, 5, weight_spec=spec, activation_spec=None)
        for mode in (True, False):
            y = layer.train(mode)(torch.empty(0, 8))
            assert y.shape == (0, 5)
            y.sum().backward()
    else:
        quantizer = specs.fitted(role, spec)
        before = {name: value.clone() for name, value in quantizer.state_dict().items()}
        for mode in (True, False):
            x = torch.empty(0, 8, 3, 3, requires_grad=True)
            y = quantizer.train(mode)(x)
            assert y.shape == x.shape
            y.sum().backward()
            assert all((p.grad == 0).all() for p in quantizer.parameters())
        assert all(torch.equal(value, before[name]) for name, value in quantizer.state_dict().items())
        if quantizer.has_integers:
            assert quantizer.codes(x).shape == x.shape


@every_quantizer
def test_integers_are_refused(role, spec):
    quantizer = specs.fitted(role, spec)
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises(TypeError) as refusal:
            quantizer(torch.ones(6, 8, 3, 3, dtype=dtype))
        name = type(quantizer).__name__
        assert str(refusal.value) == f"{name}: x must be a floating-point tensor, got {dtype}"
    if role == "activation":
        with pytest.raises(TypeError):
            qat.calibrate(quantizer, [torch.ones(6, 8, 3, 3, dtype=torch.int64)])


@every_quantizer
def test_nan_stays_nan_and_does_no_other_harm(role, spec):
    quantizer = specs.fitted(role, spec)
    x = tensor_of(role, spec)
    x[0, 0, 0, 0] = NAN
    before = {name: value.clone() for name, value in quantizer.state_dict().items()}
    for mode in (True, False):
        given = x.clone().requires_grad_()
        y = quantizer.train(mode)(given)
        assert y[0, 0, 0, 0].isnan(), "a NaN is not turned into a number"
        assert y[1:].isfinite().all() or (spec.granularity == "tensor" and role == "weight")
        if role == "activation" and not spec.rule.startswith("mx"):
            assert y.isnan().sum() == 1
    if spec.rule != "ema":
        assert all(torch.equal(value, before[name]) for name, value in quantizer.state_dict().items())
    for name, value in quantizer.state_dict().items():
        assert value.isfinite().all(), name


@every_quantizer
def test_nan_and_infinity_are_refused_in_calibration(role, spec):
    for bad in (NAN, INF):
        x = tensor_of(role, spec)
        x[0, 0, 0, 0] = bad
        quantizer = specs.new(role, spec)
        with pytest.raises(ValueError) as refusal:
            specs.fitted(role, spec, x)
        assert str(refusal.value).endswith("the values hold NaN or infinity")
        assert not quantizer.is_calibrated


@every_quantizer
def test_infinities_are_clipped(role, spec):
    quantizer = specs.fitted(role, spec)
    x = tensor_of(role, spec)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = INF, -INF
    if role == "weight" and spec.rule in ("dorefa", "apot", "binary", "ternary", "ttq"):
        return  # their statistics are infinite then
    y = quantizer.eval()(x)
    beside = y[0, :4] if role == "weight" and spec.granularity != "tensor" else y  # on the same scale
    assert y.isfinite().all() and y[0, 0, 0, 0] == beside.max() and y[0, 0, 0, 1] == beside.min()


@every_quantizer
def test_a_module_on_another_device_is_an_error_or_gives_the_right_answer(role, spec):
    on_meta = specs.new(role, spec, device="meta")
    on_meta._is_calibrated = True
    x = tensor_of(role, spec)
    stateless = not list(on_meta.parameters()) and spec.rule not in ("minmax", "ema") and spec.symmetric
    for mode in (True, False):
        try:
            y = on_meta.train(mode)(x)
        except (RuntimeError, ValueError, NotImplementedError):
            continue
        assert stateless or y.is_meta, "no numbers from parameters that have none"
        assert y.is_meta or torch.equal(y, specs.fitted(role, spec).train(mode)(x))


@pytest.mark.parametrize(("role", "spec"), [specs.QUANTIZERS[name] for name in ("weight apot", "weight apot, groups")])
def test_apot_keeps_the_size_of_tiny_weights(role, spec):
    x = tensor_of(role, spec)
    y, tiny = specs.fitted(role, spec, x)(x), specs.fitted(role, spec, x * 2.0**-24)(x * 2.0**-24) * 2.0**24
    assert 0.8 < tiny.square().sum() / y.square().sum() < 1.25


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
