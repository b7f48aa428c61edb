"""Every rule with broken parameters and with degenerate tensors."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import qat
from tests.references import rule_specs as specs
from tests.references.rule_specs import activation, every_quantizer, in_groups, tensor_of
from tests.runs.rule_training import same_state, state_of

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. the rule")  # test_rule_options.py

NAN, INF = math.nan, math.inf

LEARNED = [
    (name, parameter)
    for name, (role, spec) in specs.QUANTIZERS.items()
    for parameter, _ in specs.new(role, spec).named_parameters()
]


@pytest.mark.parametrize("broken", [0.0, -3.0, NAN, INF, -INF])
@pytest.mark.parametrize(("name", "parameter"), LEARNED, ids=str)
def test_a_broken_parameter_leaves_everything_finite(name, parameter, broken):
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
    """The squared error of the calibrated quantizer, and the least error while it recovers from a broken parameter.

    Steps are a shrinking share of the calibrated value. NaN recovers in ten steps, and so does infinity unless it is
    an end of the grid.
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
    """A finite start beyond the outermost thresholds would stay there: the published gradient is 0."""
    healthy, best = recovery_error(name, parameter, broken)
    assert best <= 2 * healthy


@pytest.mark.parametrize("size", [1e15, 1e-15, 1e-19])
@specs.quantizers(lambda role, spec: spec.rule not in ("dorefa", "power_of_two") and spec.rule[:2] != "mx")
def test_the_size_of_a_tensor_changes_nothing(role, spec, size):
    """Point 58: scales acted as at most 1e12, and beyond it all but the smallest values were lost in silence."""
    found = []
    for factor in (1.0, size):
        x = tensor_of(role, spec)
        quantizer = specs.fitted(role, spec, x * factor)
        quantizer(x.mul(factor).requires_grad_()).sum().backward()
        assert all(each.grad is None or each.grad.isfinite().all() for each in quantizer.parameters())
        found.append((quantizer.eval()(x * factor) / factor - x).norm() / x.norm())
    assert abs(found[1] - found[0]) < 0.02


def test_what_is_too_large_for_a_learned_scale_is_a_sentence():
    """Point 58."""
    x = tensor_of("activation", specs.ACTIVATIONS["lsq"])
    with pytest.raises(ValueError, match=r"'': scale would be .*e\+28, and acts as at most 1e18; use"):
        specs.fitted("activation", specs.ACTIVATIONS["lsq"], x * 1e30)
    quantizer = specs.fitted("activation", specs.ACTIVATIONS["minmax"], x * 1e30)
    assert (quantizer.eval()(x * 1e30) / 1e30 - x).norm() / x.norm() < 0.1


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


@in_groups
def test_groups_of_one_element(role, spec):
    spec = dataclasses.replace(spec, group_size=1)
    torch.manual_seed(0)
    w = torch.randn(4, 3)
    w[0, 0] = 0.0
    quantizer = specs.fitted(role, spec, w)
    y = quantizer(w.requires_grad_())
    assert y.shape == (4, 3) and y.isfinite().all()
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in (w, *quantizer.parameters()) if p.grad is not None)
    if spec.rule == "apot":
        assert (y == 0).all()  # an element less its own mean
    elif spec.rule not in ("dorefa", "power_of_two"):
        torch.testing.assert_close(y, w, rtol=0.08, atol=0)  # every element is its scale's largest


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
        before = state_of(quantizer)
        for mode in (True, False):
            x = torch.empty(0, 8, 3, 3, requires_grad=True)
            y = quantizer.train(mode)(x)
            assert y.shape == x.shape
            y.sum().backward()
            assert all((p.grad == 0).all() for p in quantizer.parameters())
        assert same_state(state_of(quantizer), before)
        if quantizer.has_integers:
            assert quantizer.codes(x).shape == x.shape


@every_quantizer
def test_integers_are_refused(role, spec):
    quantizer = specs.fitted(role, spec)
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises(TypeError, match=f"{type(quantizer).__name__}: .* got {dtype}"):
            quantizer(torch.ones(6, 8, 3, 3, dtype=dtype))
    if role == "activation":
        with pytest.raises(ValueError, match=r"^calibrate: .* with a batch of int64 "):
            qat.calibrate(quantizer, [torch.ones(6, 8, 3, 3, dtype=torch.int64)])


@every_quantizer
def test_nan_stays_nan_and_does_no_other_harm(role, spec):
    quantizer = specs.fitted(role, spec)
    x = tensor_of(role, spec)
    x[0, 0, 0, 0] = NAN
    before = state_of(quantizer)
    for mode in (True, False):
        given = x.clone().requires_grad_()
        y = quantizer.train(mode)(given)
        assert y[0, 0, 0, 0].isnan(), "a NaN is not turned into a number"
        assert y[1:].isfinite().all() or (spec.granularity == "tensor" and role == "weight")
        if role == "activation" and not spec.rule.startswith("mx"):
            assert y.isnan().sum() == 1
    if spec.rule != "ema":
        assert same_state(state_of(quantizer), before)
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


def test_a_group_size_that_does_not_divide_is_refused():
    spec = dataclasses.replace(specs.WEIGHTS["lsq, groups"], group_size=5)
    sentence = "group_size=5 does not divide the weight's 8 inputs; use 1, 2, 4, 8"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        qat.QuantConv2d(8, 3, 3, weight_spec=spec)
    with pytest.raises(ValueError, match=rf"^prepare: 1 \(weight\): {sentence}$"):
        net = nn.Sequential(nn.Conv2d(5, 8, 1), nn.Conv2d(8, 8, 1))
        qat.prepare(net, qat.QuantRecipe(weight=spec), torch.randn(2, 5, 4, 4))
