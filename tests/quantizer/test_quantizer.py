"""Quantizer modules: their state, their range, their gradients, the registry, and the axis of their blocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.functional import round_ste
from qat.quantizer import LSQQuantizer, Quantizer, create_quantizer, register_quantizer, registered_quantizers
from qat.quantizer import registry as registry_module
from qat.spec import QuantSpec, default_activation_spec, default_weight_spec
from tests.references import reference
from tests.references.prepared_case import Plain, refused
from tests.references.rule_specs import plain

SPECS = {
    "lsq symmetric": (plain(bits=4), ()),
    "lsq unsigned": (plain(signed=False), ()),
    "lsq affine": (plain(signed=False, symmetric=False), ()),
    "lsq signed affine": (plain(bits=4, symmetric=False), ()),
    "lsq per channel": (plain(granularity="channel", narrow_range=True), (3, 1)),
    "lsq_plus": (plain(signed=False, symmetric=False, rule="lsq_plus"), ()),
    "lsq_plus per channel": (plain(bits=4, symmetric=False, rule="lsq_plus", granularity="channel"), (3, 1)),
}
every_spec = pytest.mark.parametrize(("spec", "shape"), SPECS.values(), ids=SPECS.keys())


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.3


def calibrated(spec: QuantSpec, shape: tuple[int, ...] = (), low: float = -1.1, high: float = 2.3) -> Quantizer:
    quantizer = create_quantizer(spec, shape=shape)
    spread = 1 + torch.arange(quantizer.scale.numel()).reshape(shape)
    quantizer.set_range(low * spread, high * spread)
    return quantizer


@pytest.fixture
def registry(monkeypatch):
    """Names registered in a test are forgotten after it."""
    monkeypatch.setattr(registry_module, "_QUANTIZERS", dict(registry_module._QUANTIZERS))


@every_spec
def test_codes_and_output_equal_numpy(spec, shape):
    quantizer = calibrated(spec, shape)
    x = torch.cat([data(3, 200) * 3, quantizer.scale.detach() * torch.tensor([0.5, 1.5, -2.5]).expand(3, 3)], dim=1)
    scale, zero = (part.detach().numpy() for part in quantizer.grid())
    expected = reference.codes(x.numpy(), scale, zero, spec.qmin, spec.qmax)
    assert expected.dtype == np.float32  # NumPy divides in the same precision, so equal means equal
    assert expected.min() == spec.qmin and expected.max() == spec.qmax
    np.testing.assert_array_equal(quantizer.codes(x).detach().numpy(), expected)
    np.testing.assert_array_equal(quantizer(x).detach().numpy(), (expected - zero) * scale)


def test_what_a_spec_leaves_open_is_that_of_the_role():
    for make in (create_quantizer, LSQQuantizer):
        weight, activation = make(QuantSpec(bits=4), "weight", (3, 1)), make(QuantSpec(bits=4))
        assert weight.spec == replace(default_weight_spec(), bits=4, init="mse")
        assert activation.spec == replace(default_activation_spec(), bits=4)
    assert qat.quantizer.scale_shape(QuantSpec(bits=4), (3, 8)) == (3, 1)


def test_loading_an_uncalibrated_state_forgets_the_calibration():
    quantizer = calibrated(QuantSpec())
    quantizer.load_state_dict(create_quantizer(QuantSpec()).state_dict())
    assert not quantizer.is_calibrated


@every_spec
def test_the_default_range_reaches_four(spec, shape):
    with pytest.warns(UserWarning, match="runs on its default range"):
        y = create_quantizer(spec, shape=shape)(torch.full((3, 2), 3.9))
    assert (y - 3.9).abs().max() <= 8 / 2**spec.bits


@every_spec
def test_set_range_writes_into_the_optimizers_parameters(spec, shape):
    quantizer = create_quantizer(spec, shape=shape)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.01)
    before = [id(parameter) for parameter in quantizer.parameters()]
    quantizer.set_range(torch.tensor(-0.5), torch.tensor(1.5))
    expected = reference.grid_of(-0.5, 1.5, spec.qmin, spec.qmax, spec.symmetric)
    for part, value in zip(quantizer.grid(), expected, strict=True):
        assert part.shape == shape and part.flatten().tolist() == pytest.approx([value] * quantizer.scale.numel())
    assert [id(parameter) for parameter in quantizer.parameters()] == before
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == before
    quantizer(data(3, 50) * 9).sum().backward()
    optimizer.step()
    assert quantizer.grid()[0].flatten()[0].item() != pytest.approx(expected[0], rel=1e-6)
    assert all(parameter.requires_grad for parameter in quantizer.parameters())


@pytest.mark.parametrize(("role", "grad_scale", "shape", "x_shape", "count"), [
    ("activation", "sample", (), (8, 3, 5, 5), 75),
    ("activation", "batch", (), (8, 3, 5, 5), 600),
    ("activation", "none", (), (8, 3, 5, 5), None),
    ("activation", "sample", (3, 1, 1), (8, 3, 5, 5), 25),
    ("activation", "batch", (3, 1, 1), (8, 3, 5, 5), 200),
    ("activation", "sample", (), (7,), 7),
    ("weight", "sample", (8, 1, 1, 1), (8, 3, 5, 5), 75),
    ("weight", "batch", (8, 1, 1, 1), (8, 3, 5, 5), 75),
    ("weight", "sample", (), (8, 3, 5, 5), 600),
    ("weight", "none", (8, 1, 1, 1), (8, 3, 5, 5), None),
])  # fmt: skip
@pytest.mark.parametrize("signed", [True, False])
def test_the_scales_gradient_is_scaled_by_the_papers_factor(role, grad_scale, shape, x_shape, count, signed):
    spec = plain(bits=4, signed=signed, grad_scale=grad_scale)
    quantizer = create_quantizer(spec, role, shape)
    quantizer.set_range(torch.tensor(0.0 if not signed else -1.0), torch.tensor(1.0))
    x = data(*x_shape)
    factor = 1.0 if count is None else 1 / math.sqrt(count * spec.qmax)
    assert quantizer.gradient_factor(x) == pytest.approx(factor, rel=1e-12)
    quantizer(x).sum().backward()
    scale = quantizer.scale.detach().double().numpy()
    _, expected = reference.lsq(spec.qmin, spec.qmax, factor).backward(np.ones(x_shape), x.double().numpy(), scale)
    assert quantizer.scale.grad.shape == shape
    np.testing.assert_allclose(quantizer.scale.grad.double().numpy(), expected, rtol=1e-3, atol=1e-3)


def test_lsq_plus_learns_its_zero_point_and_acts_as_an_integer():
    quantizer = calibrated(QuantSpec(bits=4, signed=False, symmetric=False, rule="lsq_plus"))
    assert {name for name, _ in quantizer.named_parameters()} == {"scale", "zero_point"}
    x = data(500) * 3
    factor = 1 / math.sqrt(500 * 15)
    with torch.no_grad():
        quantizer.zero_point.add_(0.4)
    quantizer(x).sum().backward()
    scale, zero = (part.detach().double().numpy() for part in (quantizer.scale, quantizer.zero_point))
    expected = reference.lsq_plus(0, 15, factor).backward(np.ones(500), x.double().numpy(), scale, zero)
    assert quantizer.scale.grad.item() == pytest.approx(expected[1].item(), rel=1e-3)
    # The zero point follows as the offset -scale * zero_point would: factor 1/scale^2.
    assert quantizer.zero_point.grad.item() == pytest.approx(expected[2].item() / scale.item() ** 2, rel=1e-3)
    with torch.no_grad():
        quantizer.zero_point.fill_(99.0)
    assert quantizer.grid()[1].item() == 15
    assert quantizer(torch.zeros(1)).item() == 0


OWN = "; import the module of one of your own first (in a config: imports)"  # point 34


def test_unknown_rules_are_refused_with_the_names_there_are():
    assert {"lsq", "lsq_plus"} <= set(registered_quantizers())
    names = ", ".join(registered_quantizers())
    for rule, hint in (("lqs", "; did you mean 'lsq'?"), ("nothing_like_it", OWN)):
        with refused(f"unknown quantizer {rule!r}; registered: {names}{hint}"):
            create_quantizer(QuantSpec(rule=rule))


def test_a_decorator_without_a_name_is_refused(registry):
    """Point 34: it made the class a function, in silence."""
    for wrong in (LSQQuantizer, "", 3):
        with pytest.raises(TypeError, match=r'^register_quantizer: write @register_quantizer\("name"\) above the '):
            register_quantizer(wrong)


def returning(name, compute):
    """A registered rule that returns this of its tensor."""
    return register_quantizer(name)(type(name, (Quantizer,), {"quantize": lambda self, x: compute(x)}))


@pytest.mark.parametrize("compute", [lambda x: x.sum(0), lambda x: x.double(), lambda x: None, lambda x: x[None]])
def test_a_rule_that_returns_another_tensor_is_named(registry, compute):
    """Point 34: another shape or dtype ended in an error of torch, far from the rule."""
    returning("Careless", compute)
    quantizer = create_quantizer(QuantSpec(rule="Careless"))
    quantizer.mark_calibrated()
    with pytest.raises(ValueError, match=r"^Careless\.quantize: x is float32 \(2, 3\), what it returned "):
        quantizer(torch.randn(2, 3))


def test_a_rule_that_gives_nan_is_named_itself(registry):
    """Point 34: the quantizer behind it was blamed."""
    returning("Careless", lambda x: x / 0 * 0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    model = qat.prepare(net, qat.QuantRecipe(weight={"rule": "Careless"}), x)
    with pytest.raises(ValueError, match=r"^calibrate: weight of '0': behind the rule 'Careless' the values hold NaN"):
        qat.calibrate(model, x)


def test_your_own_rule_is_registered_and_used(registry):
    @register_quantizer("half_range")
    class HalfRange(Quantizer):
        def quantize(self, x: Tensor) -> Tensor:
            scale, _ = self.grid()
            return round_ste(x / scale).clamp(self.spec.qmin // 2, self.spec.qmax // 2) * scale

    quantizer = create_quantizer(QuantSpec(rule="half_range"), "weight", (2, 1))
    assert type(quantizer) is HalfRange and "half_range" in registered_quantizers()
    quantizer.set_range(torch.tensor(-1.27), torch.tensor(1.27))
    assert quantizer(torch.tensor([[9.0], [0.1]])).flatten().tolist() == pytest.approx([0.63, 0.1])
    assert register_quantizer("half_range")(HalfRange) is HalfRange  # a notebook's cell that runs again


def test_wrong_registrations_are_refused(registry):
    with pytest.raises(ValueError) as refusal:
        register_quantizer("lsq")(type("Other", (Quantizer,), {}))
    assert "taken by qat.quantizer.rules.lsq.LSQQuantizer" in str(refusal.value)
    for stranger in (nn.ReLU, 3):
        with pytest.raises(TypeError, match="'mine'"):
            register_quantizer("mine")(stranger)
    assert "mine" not in registered_quantizers()


def test_a_rule_without_quantize_is_refused():
    bare = Quantizer(QuantSpec())
    bare.set_range(torch.tensor(-1.0), torch.tensor(1.0))
    with pytest.raises(TypeError, match="must implement quantize"):
        bare(torch.ones(2))


def test_a_relative_step_multiplies_the_scale():
    """scale^2 times the plain gradient, without LSQ's factor: a step of size lr changes the logarithm by lr."""
    gradients = []
    for grad_scale in ("none", "relative"):
        quantizer = calibrated(plain(bits=4, grad_scale=grad_scale))
        quantizer(data(200)).sum().backward()
        gradients.append(quantizer.scale.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * quantizer.scale.detach().square())


LINEAR, FUNCTION = nn.Linear(8, 4), Plain(lambda self, x: nn.functional.conv1d(x, self.w), w=nn.Conv1d(8, 4, 3).weight)
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], int]] = {
    **{f"linear, {len(shape)} axes": (LINEAR, shape, -1) for shape in [(8,), (3, 8), (2, 3, 8), (2, 5, 3, 8)]},
    "conv1d": (nn.Conv1d(8, 4, 3), (2, 8, 6), 1),
    "conv2d": (nn.Conv2d(8, 4, 3), (2, 8, 5, 6), 1),
    "conv2d, one image": (nn.Conv2d(8, 4, 3), (8, 5, 6), 0),
    "conv3d": (nn.Conv3d(8, 4, 3), (2, 8, 4, 5, 6), 1),
    "functional conv1d": (FUNCTION, (2, 8, 6), 1),
    "conv_transpose1d": (nn.ConvTranspose1d(8, 4, 3), (2, 8, 6), 1),
    "conv_transpose2d": (nn.ConvTranspose2d(8, 4, 3), (2, 8, 5, 6), 1),
}


def blocks_of(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """int8 with 6 bits behind the point, times the power of two below each block's largest value."""
    rows = np.moveaxis(x, axis, -1)
    blocks = rows.reshape(*rows.shape[:-1], -1, size)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))))
    found = np.clip(np.round(blocks / scale * 64), -127, 127) / 64 * scale
    return np.moveaxis(found.reshape(rows.shape), -1, axis)


@pytest.mark.parametrize("name", LAYERS)
def test_blocks_lie_along_what_is_summed(name: str) -> None:
    layer, shape, axis = LAYERS[name]
    torch.manual_seed(0)
    x = (torch.randn(shape).movedim(axis, -1) * torch.logspace(-2, 2, 8)).movedim(-1, axis).contiguous()
    spec = {"rule": "mxint8", "bits": 8, "symmetric": True, "signed": True, "options": {"block_size": 4}}
    model = qat.prepare(nn.Sequential(layer), qat.QuantRecipe(activation=spec), x)
    seen: list[Tensor] = []
    model.get_submodule("input_quantizer").register_forward_hook(lambda module, args, y: seen.append(y))
    qat.calibrate(model, [(x,)])
    model.train()(x)
    assert np.array_equal(seen[-1].detach().numpy(), blocks_of(x.numpy(), axis, 4).astype(np.float32))


def test_a_layers_own_quantizer_knows_it_too() -> None:
    spec = qat.QuantSpec(rule="mxint8", bits=8, symmetric=True, signed=True)
    layers = qat.QuantLinear(8, 4, activation_spec=spec), qat.QuantConv1d(8, 4, 3, activation_spec=spec)
    assert [layer.input_quantizer.summed_axis for layer in layers] == [-1, -2]
