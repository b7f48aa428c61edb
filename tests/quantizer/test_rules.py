"""Every registered rule as a module: the table of rules, one quantizer, observed ranges, and its two switches."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import qat
from qat import QuantLinear, calibrate, freeze_scales
from qat.quantizer import Quantizer, create_quantizer, registered_quantizers, scale_shape
from qat.quantizer import registry as registry_module
from qat.quantizer.base import Role
from qat.spec import QuantSpec
from tests.references import reference
from tests.references import rule_specs as specs
from tests.references.rule_specs import every_quantizer, fitted, grid_values, in_groups, quantizers, tensor_of
from tests.runs.rule_training import same_state, state_of


def table() -> list[tuple[Role, QuantSpec]]:
    return list(specs.QUANTIZERS.values())


def test_the_table_holds_every_registered_rule():
    classes = {name: registry_module._QUANTIZERS[name] for name in registered_quantizers()}
    own = {name for name, each in classes.items() if each.__module__.startswith("qat.quantizer.rules.")}
    assert {spec.rule for _, spec in table()} == own


def test_the_table_holds_every_role_and_every_option_of_a_rule():
    for rule in {spec.rule for _, spec in table()}:
        rows = [(role, spec) for role, spec in table() if spec.rule == rule]
        cls = registry_module._QUANTIZERS[rule]
        expected = set(cls.roles) if rule != "pact" else {"activation"}  # PACT clips negative values away
        assert {role for role, _ in rows} == expected, rule
        for option in dataclasses.fields(cls.options_type):
            given = [spec.options[option.name] for _, spec in rows if option.name in spec.options]
            only_one = rule in ("mxfp4", "mxint8") and option.name == "format"
            assert given and (only_one or any(value != option.default for value in given)), (rule, option.name)
    uniform = {spec.rule for _, spec in table() if registry_module._QUANTIZERS[spec.rule].uniform}
    assert {spec.rule for _, spec in table() if spec.ewgs == "fixed"} >= uniform - {"ema"}
    assert {spec.bits for _, spec in table()} >= {1, 2, 3, 4, 5, 6, 7, 8, 9, 16}


@every_quantizer
def test_in_evaluation_the_output_is_what_the_codes_stand_for(role, spec):
    quantizer = fitted(role, spec).eval()
    assert (quantizer.refusal() is None) == quantizer.has_integers
    if not quantizer.has_integers:
        assert quantizer.refusal() in (
            f"uses the rule {spec.rule!r}, whose values lie on no integer grid",
            "has a scale per group of 4 inputs, which ONNX Runtime's integer kernels lack",
        )
        return
    x = tensor_of(role, spec, seed=1) * 1.5
    codes, (low, high) = quantizer.codes(x), quantizer.bounds()
    assert codes.dtype == torch.float32 and torch.equal(codes, codes.round())
    assert codes.min() >= low and codes.max() <= high
    torch.testing.assert_close(quantizer(x), grid_values(quantizer, x), rtol=1e-6, atol=0)
    scale, zero_point = quantizer.grid(x)
    assert (scale > 0).all() and torch.equal(zero_point, zero_point.round())
    if (role, spec.rule) not in (("weight", "dorefa"), ("weight", "binary")):  # which have no level zero
        x[:, 0] = 0
        assert (quantizer(x)[:, 0] == 0).all()


@every_quantizer
def test_bounds_are_the_integers_of_the_rule(role, spec):
    quantizer = fitted(role, spec)
    mirrored = {"n2uq", "learned_bits"} if spec.signed else set()
    if spec.rule in ("binary", "ternary"):
        expected = (-1, 1)
    elif role == "weight" and spec.rule == "dorefa":
        expected = (1 - 2**spec.bits, 2**spec.bits - 1)
    else:
        expected = (-spec.qmax if spec.rule in mirrored else spec.qmin, spec.qmax)
    assert quantizer.bounds() == expected
    if spec.rule == "learned_bits":  # and of the width that it has learned
        width = max(3, spec.options.get("least", 2))
        with torch.no_grad():
            quantizer.bits.fill_(width + 0.3)
        assert quantizer.bounds() == reference.bounds(width, spec.signed, narrow=True)


@quantizers(lambda role, spec: spec.rule.startswith("mx"))
def test_blocks_run_along_the_inputs(role, spec):
    quantizer = fitted(role, spec)
    shapes = {(6, 8, 3, 3): 1, (6, 8): 1} if role == "weight" else {(2, 8, 3, 3): 1, (2, 3, 8): -1, (4, 8): -1}
    for shape, axis in shapes.items():
        x = torch.randn(shape) * torch.logspace(-2, 2, 8).reshape([8 if size == 8 else 1 for size in shape])
        y = quantizer(x)
        default = {"mxfp8": "e4m3", "mxfp6": "e2m3", "mxfp4": "e2m1", "mxint8": "int8"}[spec.rule]
        chosen, size = spec.options.get("format", default), spec.options.get("block_size", 32)
        blocks = [qat.functional.mx_quantize(block, chosen, size, axis) for block in x.split(size, axis)]
        assert torch.equal(y, torch.cat(blocks, axis)), "the last block may be a shorter one"


def is_idempotent(role: Role, spec: QuantSpec) -> bool:
    """All but DoReFa's weights, which pass through tanh again, and APoT's, which are normalised again."""
    if role == "weight" and spec.rule == "dorefa":
        return spec.bits == 1
    return role == "activation" or spec.rule != "apot" or not spec.options.get("normalize")


@quantizers(is_idempotent)
def test_what_is_quantized_stays_as_it_is(role, spec):
    quantizer = fitted(role, spec).eval()
    once = quantizer(tensor_of(role, spec, seed=1) * 1.5)
    torch.testing.assert_close(quantizer(once), once, rtol=1e-6, atol=1e-7)


@every_quantizer
def test_only_observed_ranges_follow_data_and_only_in_training(role, spec):
    quantizer = fitted(role, spec)
    before = state_of(quantizer)
    x = (tensor_of(role, spec, seed=1) * 100).requires_grad_()
    for mode in (False, True):
        quantizer.train(mode)(x).sum().backward()
        assert same_state(state_of(quantizer), before) == (not mode or spec.rule not in ("minmax", "ema"))


@every_quantizer
def test_state_survives_files_copies_and_meta(role, spec):
    quantizer = fitted(role, spec)
    quantizer.set_progress(0.4)
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.mul_(0.93)
        quantizer(tensor_of(role, spec, seed=1))
    quantizer.eval()
    x = tensor_of(role, spec, seed=2)
    expected = quantizer(x)
    fresh, on_meta = specs.new(role, spec), specs.new(role, spec, device="meta")
    assert not fresh.is_calibrated and not on_meta.is_calibrated
    assert all(tensor.is_meta for tensor in [*on_meta.parameters(), *on_meta.buffers()])
    assert fresh.state_dict().keys() == quantizer.state_dict().keys() == on_meta.state_dict().keys()
    fresh.load_state_dict(quantizer.state_dict())
    on_meta.load_state_dict(quantizer.state_dict(), assign=True)
    for other in (fresh, on_meta, copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        other.eval()
        assert not any(tensor.is_meta for tensor in [*other.parameters(), *other.buffers()])
        assert other.is_calibrated and same_state(state_of(other), state_of(quantizer))
        assert torch.equal(other(x), expected)
        if other.has_integers:
            assert torch.equal(other.codes(x), quantizer.codes(x))
            for ours, theirs in zip(other.grid(x), quantizer.grid(x), strict=True):
                assert ours.device.type == "cpu" and torch.equal(ours, theirs)
    if role == "activation":  # and it can be calibrated
        qat.calibrate(on_meta, [x])
        assert on_meta(x).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_quantizer
def test_other_dtypes_are_kept_and_near_float32(role, spec, dtype):
    x = tensor_of(role, spec)
    expected = fitted(role, spec).eval()(x).double()
    quantizer = fitted(role, spec).to(dtype)
    given = x.to(dtype).requires_grad_()
    y = quantizer(given)
    assert y.dtype == dtype and y.isfinite().all()
    y.sum().backward()
    for tensor in (given, *quantizer.parameters()):
        assert tensor.grad is not None and tensor.grad.dtype == dtype and tensor.grad.isfinite().all()
    quantizer = fitted(role, spec).to(dtype).eval()
    y = quantizer(x.to(dtype))
    assert y.dtype == dtype
    gap = (y.double() - expected).abs().mean() / expected.abs().mean()
    assert gap < 0.02, "a rounded scale moves a few values to the next level, not more"
    if quantizer.has_integers:
        ulp = torch.finfo(dtype).eps if dtype != torch.float64 else torch.finfo(torch.float32).eps
        torch.testing.assert_close(grid_values(quantizer, x.to(dtype)).to(dtype), y, rtol=ulp, atol=0)


@every_quantizer
def test_every_parameter_learns(role, spec):
    quantizer = fitted(role, spec)
    x = (tensor_of(role, spec, seed=1) * 3).requires_grad_()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) + 0.2
    ((quantizer(x) * weights).sum() + qat.penalty(quantizer)).backward()
    for name, tensor in (("x", x), *quantizer.named_parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all() and (tensor.grad != 0).any(), name


@every_quantizer
def test_it_may_run_twice_before_backward_and_under_autocast(role, spec):
    quantizer, twin = fitted(role, spec), fitted(role, spec)
    x = tensor_of(role, spec).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = quantizer(x)
    assert torch.equal(y, twin(x)), "autocast changes nothing"
    (y + quantizer(2 * x)).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (x, *quantizer.parameters()))


@every_quantizer
def test_parameters_lie_in_memory_as_their_shape_says(role, spec):
    """DistributedDataParallel warns at every step about a parameter with a stride of 0 from expand."""
    one_channel = create_quantizer(spec, role, scale_shape(spec, (1, 4, 3, 3)) if role == "weight" else ())
    for quantizer in (one_channel, specs.new(role, spec), fitted(role, spec)):
        for name, tensor in (*quantizer.named_parameters(), *quantizer.named_buffers()):
            assert tensor.stride() == torch.empty(tensor.shape).stride(), name


@every_quantizer
def test_an_uncalibrated_quantizer_warns_and_runs(role, spec):
    quantizer = specs.new(role, spec)
    with pytest.warns(UserWarning) as record:
        y = quantizer(tensor_of(role, spec))
    (warning,) = record
    assert str(warning.message).startswith(f"a quantizer ({spec}) runs on its default range") and y.isfinite().all()


@in_groups
def test_groups_are_channels_of_a_weight_of_more_rows(role, spec):
    x = tensor_of(role, spec)
    rows = x.reshape(12, 4, 3, 3)
    by_group = fitted(role, spec, x)
    by_row = fitted(role, dataclasses.replace(spec, granularity="channel", group_size=None), rows)
    for quantizer in (by_group, by_row):
        quantizer.train()
    y, expected = by_group(x), by_row(rows)
    assert torch.equal(y.reshape(12, 4, 3, 3), expected)
    if by_row.has_integers:
        assert torch.equal(by_group.codes(x).reshape(rows.shape), by_row.codes(rows))
    if by_group._positive:
        y.square().sum().backward()
        expected.square().sum().backward()
        for ours, theirs in zip(by_group.parameters(), by_row.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.flatten(), theirs.grad.flatten())


@quantizers(lambda role, spec: spec.ewgs != "none")
def test_ewgs_scales_the_gradient_by_the_distance_to_the_level(role, spec):
    corrected, plain = fitted(role, spec), fitted(role, dataclasses.replace(spec, ewgs="none", ewgs_delta=None))
    delta = 1e-3 if spec.ewgs_delta is None else spec.ewgs_delta
    if spec.ewgs == "hessian":
        assert corrected.ewgs_delta.item() == 0.0
        delta = 0.3
        corrected.ewgs_delta.fill_(delta)
    if spec.rule == "learned_bits":
        with torch.no_grad():
            for quantizer in (corrected, plain):
                quantizer.bits.sub_(2)
    x = tensor_of(role, spec, seed=1) * 1.5
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    gradients = []
    for quantizer in (plain, corrected):
        given = x.clone().requires_grad_()
        y = quantizer(given)
        y.backward(upstream)
        gradients.append(given.grad)
    assert torch.equal(y, plain(x)) or spec.rule in ("minmax", "ema")
    grouped = x.reshape(6, 2, 4, 3, 3) if spec.granularity == "group" else x
    v = (grouped / corrected.grid(grouped)[0].detach()).reshape(x.shape)
    low, high = corrected.bounds()
    share = (v - v.round()) / (high - low)
    expected = gradients[0] * (1 + delta * torch.sign(gradients[0]) * share)
    torch.testing.assert_close(gradients[1], expected, rtol=1e-4, atol=1e-6)
    assert not torch.equal(gradients[1], gradients[0])


def extremes(batch: np.ndarray, axes: tuple[int, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value, with zero included."""
    return np.minimum(batch.min(axes), 0), np.maximum(batch.max(axes), 0)


@quantizers(lambda role, spec: spec.rule in ("minmax", "ema"))
def test_observed_ranges_are_those_that_numpy_finds(role, spec):
    quantizer = fitted(role, spec)
    axes = {"tensor": None, "channel": (1, 2, 3), "group": (2, 3, 4)}[spec.granularity]
    low, high = quantizer.low.double().numpy().squeeze(), quantizer.high.double().numpy().squeeze()
    for seed in range(1, 5):
        x = tensor_of(role, spec, seed) * (0.5 + seed % 3)
        quantizer.train()(x)
        values = x.double().numpy()
        batch = extremes(values.reshape(6, 2, 4, 3, 3) if spec.granularity == "group" else values, axes)
        if spec.rule == "ema":
            momentum = spec.options.get("momentum", 0.01)
            low, high = ((1 - momentum) * old + momentum * new for old, new in zip((low, high), batch, strict=True))
        elif role == "weight":
            low, high = batch
        else:
            low, high = np.minimum(low, batch[0]), np.maximum(high, batch[1])
        np.testing.assert_allclose(quantizer.low.numpy().squeeze(), low, rtol=1e-6)
        np.testing.assert_allclose(quantizer.high.numpy().squeeze(), high, rtol=1e-6)
    grouped = x.reshape(6, 2, 4, 3, 3) if spec.granularity == "group" else x
    scale, zero_point = (part.double().numpy().flatten() for part in quantizer.grid(grouped))
    for i in range(scale.size):
        bottom, top = (float(np.ravel(end)[i]) for end in (low, high))
        expected = reference.grid_of(bottom, top, spec.qmin, spec.qmax, spec.symmetric)
        assert (scale[i], zero_point[i]) == (pytest.approx(expected[0], rel=1e-6), expected[1])


def test_a_binary_activation_starts_at_its_mean_magnitude():
    for spec in (specs.ACTIVATIONS["binary"], specs.ACTIVATIONS["binary, straight through"]):
        batches = [tensor_of("activation", spec, seed) for seed in range(3)]
        quantizer = specs.new("activation", spec)
        qat.calibrate(quantizer, batches)
        assert quantizer.scale.item() == pytest.approx(torch.cat(batches).abs().mean().item(), rel=1e-5), spec.init


@quantizers(lambda role, spec: spec.rule == "power_of_two")
def test_a_power_of_two_covers_its_range_and_not_twice_that(role, spec):
    spec = dataclasses.replace(spec, init="minmax")
    x = tensor_of(role, spec)
    quantizer = fitted(role, spec, x)
    grouped = x.reshape(6, 2, 4, 3, 3) if spec.granularity == "group" else x
    scale, zero_point = quantizer.grid(grouped)
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())
    v = grouped / scale + zero_point
    beyond = 0 if spec.symmetric else 0.5  # the zero point is rounded
    assert v.min() >= spec.qmin - beyond and v.max() <= spec.qmax + beyond, "nothing is clipped"
    axes = {"tensor": None, "channel": (1, 2, 3), "group": (2, 3, 4)}[spec.granularity]
    low, high = extremes(grouped.numpy(), axes)
    for i in range(scale.numel()):
        needed, _ = reference.grid_of(np.ravel(low)[i], np.ravel(high)[i], spec.qmin, spec.qmax, spec.symmetric)
        assert needed <= scale.flatten()[i] * (1 + 1e-6) and scale.flatten()[i] < 2 * needed


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
def test_frozen_observed_ranges_hold_after_loading_too(rule: str) -> None:
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
